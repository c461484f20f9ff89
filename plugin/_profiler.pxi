# The profiler that jaxlib asks plugins for: a second table, of functions that are handlers. Part of `_capi`.
# Its errors are those of the PJRT C API, whose accessors take the same arguments.

cdef void* profiler_destroy(void* a) noexcept nogil:
    cdef void* handle = (<PLUGIN_Profiler_Destroy_Args*>a).profiler
    if handle != NULL:
        release(handle)
    return NULL


cdef PLUGIN_Profiler_Api profiler
cdef PJRT_Profiler_Extension profiler_extension


cdef void add_profiler(PJRT_Api* api) noexcept nogil:
    """Put the profiler's table into the chain of extensions."""
    memset(&profiler, 0, sizeof(profiler))
    profiler.struct_size = <size_t>(<char*>&profiler.tail0 - <char*>&profiler)
    profiler.error_destroy = <void*>error_destroy
    profiler.error_message = <void*>error_message
    profiler.error_get_code = <void*>error_get_code
    profiler.create = <void*>entry_PLUGIN_Profiler_Create
    profiler.destroy = <void*>profiler_destroy
    profiler.start = <void*>entry_PLUGIN_Profiler_Start
    profiler.stop = <void*>entry_PLUGIN_Profiler_Stop
    profiler.collect_data = <void*>entry_PLUGIN_Profiler_CollectData
    profiler_extension.base.struct_size = sizeof(profiler_extension)
    profiler_extension.base.type = 1  # PJRT_Extension_Type_Profiler
    profiler_extension.base.next = api.extension_start
    profiler_extension.profiler_api = &profiler
    profiler_extension.traceme_context_id = -1
    api.extension_start = &profiler_extension
