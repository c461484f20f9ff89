"""Layout of the PJRT C API, version 0.91, as data.

A struct is a line of ``type name`` pairs. Types: ``ptr`` any pointer, ``str`` a ``const char*``, ``fn`` a
function pointer, ``size`` ``iptr`` ``uptr`` ``int`` ``enum`` ``i32`` ``i64`` ``u64`` ``f32`` ``bool`` the C
types of that name, or the name of another struct or union, held in place. The structs in `STRUCTS` begin
with ``size struct_size, ptr extension_start``; those in `PLAIN` hold just what is listed. A union
of C is a named union here; it has the same layout.

`FUNCTIONS` are the entries of ``PJRT_Api`` in their order, after its own head and version; `EXTENSIONS`
are further tables of functions, which jaxlib finds by their type in a chain that begins there. From these
tables come the ctypes classes (`structs`) and the declarations that the extension module is compiled
with (`abi_codegen`). Source: ``xla/pjrt/c/pjrt_c_api.h``, for the structs of extensions the headers in
``xla/pjrt/extensions``.

jaxlib adapts to what a plugin announces. 0.91 is announced: from there on jaxlib asks for shardings by the
extension, and from about 0.105 on it expects errors, memories and others to begin with a table of functions.
"""

from __future__ import annotations

MAJOR, MINOR = 0, 91

HEAD = "size struct_size, ptr extension_start"

UNIONS: dict[str, str] = {
    "PJRT_NamedValue_Union": (
        "str string_value, i64 int64_value, ptr int64_array_value, f32 float_value, bool bool_value"
    ),
    "PJRT_Buffer_MemoryLayout_Union": (
        "PJRT_Buffer_MemoryLayout_Tiled tiled, PJRT_Buffer_MemoryLayout_Strides strides"
    ),
}

PLAIN: dict[str, str] = {
    "PJRT_Extension_Base": "size struct_size, enum type, ptr next",
    "PJRT_ProcessInfo": (
        "size struct_size, int task_id, u64 incarnation_id, enum state, int error_code, "
        "str error_message, size error_message_size"
    ),
    "PJRT_Chunk": "ptr data, size size, fn deleter, ptr deleter_arg",
    "PJRT_SendCallbackInfo": "i64 channel_id, ptr user_arg, fn send_callback",
    "PJRT_RecvCallbackInfo": "i64 channel_id, ptr user_arg, fn recv_callback",
    "PJRT_Buffer_CopyRawToHostFuture_Callback_Args": (
        "size struct_size, ptr callback_data, enum error_code, str error_message, "
        "size error_message_size, ptr dst"
    ),
    "PJRT_Buffer_DonateWithControlDependency_Callback_Args": (
        "size struct_size, ptr callback_data, enum error_code, str error_message, "
        "size error_message_size"
    ),
}

STRUCTS: dict[str, str] = {
    "PJRT_Api_Version": "int major_version, int minor_version",
    "PJRT_Error_Destroy_Args": "ptr error",
    "PJRT_Error_Message_Args": "ptr error, str message, size message_size",
    "PJRT_Error_GetCode_Args": "ptr error, enum code",
    "PJRT_NamedValue": (
        "str name, size name_size, enum type, PJRT_NamedValue_Union value, size value_size"
    ),
    "PJRT_Plugin_Initialize_Args": "",
    "PJRT_Plugin_Attributes_Args": "ptr attributes, size num_attributes",
    "PJRT_Event_Destroy_Args": "ptr event",
    "PJRT_Event_IsReady_Args": "ptr event, bool is_ready",
    "PJRT_Event_Error_Args": "ptr event",
    "PJRT_Event_Await_Args": "ptr event",
    "PJRT_Event_OnReady_Args": "ptr event, fn callback, ptr user_arg",
    "PJRT_Event_Create_Args": "ptr event",
    "PJRT_Event_Set_Args": (
        "ptr event, enum error_code, str error_message, size error_message_size"
    ),
    "PJRT_KeyValueGetCallback_Args": (
        "str key, size key_size, int timeout_in_ms, ptr callback_error, ptr user_arg, "
        "str value, size value_size, fn value_deleter_callback"
    ),
    "PJRT_KeyValueTryGetCallback_Args": (
        "str key, size key_size, ptr callback_error, ptr user_arg, str value, size value_size, "
        "fn value_deleter_callback"
    ),
    "PJRT_KeyValuePutCallback_Args": (
        "str key, size key_size, str value, size value_size, ptr callback_error, ptr user_arg"
    ),
    "PJRT_Client_Create_Args": (
        "ptr create_options, size num_options, fn kv_get_callback, ptr kv_get_user_arg, "
        "fn kv_put_callback, ptr kv_put_user_arg, ptr client, fn kv_try_get_callback, "
        "ptr kv_try_get_user_arg"
    ),
    "PJRT_Client_Destroy_Args": "ptr client",
    "PJRT_Client_PlatformName_Args": "ptr client, str platform_name, size platform_name_size",
    "PJRT_Client_ProcessIndex_Args": "ptr client, int process_index",
    "PJRT_Client_PlatformVersion_Args": (
        "ptr client, str platform_version, size platform_version_size"
    ),
    "PJRT_Client_TopologyDescription_Args": "ptr client, ptr topology",
    "PJRT_Client_Devices_Args": "ptr client, ptr devices, size num_devices",
    "PJRT_Client_AddressableDevices_Args": (
        "ptr client, ptr addressable_devices, size num_addressable_devices"
    ),
    "PJRT_Client_LookupDevice_Args": "ptr client, int id, ptr device",
    "PJRT_Client_LookupAddressableDevice_Args": (
        "ptr client, int local_hardware_id, ptr addressable_device"
    ),
    "PJRT_Client_UpdateGlobalProcessInfo_Args": (
        "ptr client, ptr process_infos, size num_process_infos"
    ),
    "PJRT_Client_AddressableMemories_Args": (
        "ptr client, ptr addressable_memories, size num_addressable_memories"
    ),
    "PJRT_Program": "str code, size code_size, str format, size format_size",
    "PJRT_Client_Compile_Args": (
        "ptr client, ptr program, str compile_options, size compile_options_size, ptr executable"
    ),
    "PJRT_Client_DefaultDeviceAssignment_Args": (
        "ptr client, int num_replicas, int num_partitions, size default_assignment_size, "
        "ptr default_assignment"
    ),
    "PJRT_Client_DmaMap_Args": "ptr client, ptr data, size size",
    "PJRT_Client_DmaUnmap_Args": "ptr client, ptr data",
    "PJRT_AsyncHostToDeviceTransferManager_Destroy_Args": "ptr transfer_manager",
    "PJRT_AsyncHostToDeviceTransferManager_TransferData_Args": (
        "ptr transfer_manager, int buffer_index, ptr data, i64 offset, i64 transfer_size, "
        "bool is_last_transfer, ptr done_with_h2d_transfer"
    ),
    "PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer_Args": (
        "ptr transfer_manager, int buffer_index, ptr buffer_out"
    ),
    "PJRT_AsyncHostToDeviceTransferManager_Device_Args": "ptr transfer_manager, ptr device_out",
    "PJRT_AsyncHostToDeviceTransferManager_BufferCount_Args": (
        "ptr transfer_manager, size buffer_count"
    ),
    "PJRT_AsyncHostToDeviceTransferManager_BufferSize_Args": (
        "ptr transfer_manager, int buffer_index, size buffer_size"
    ),
    "PJRT_AsyncHostToDeviceTransferManager_SetBufferError_Args": (
        "ptr transfer_manager, int buffer_index, enum error_code, str error_message, "
        "size error_message_size"
    ),
    "PJRT_AsyncHostToDeviceTransferManager_AddMetadata_Args": (
        "ptr transfer_manager, ptr transfer_metadata, size num_metadata"
    ),
    "PJRT_Buffer_MemoryLayout_Tiled": (
        "ptr minor_to_major, size minor_to_major_size, ptr tile_dims, ptr tile_dim_sizes, "
        "size num_tiles"
    ),
    "PJRT_Buffer_MemoryLayout_Strides": "ptr byte_strides, size num_byte_strides",
    "PJRT_Buffer_MemoryLayout": "PJRT_Buffer_MemoryLayout_Union layout, enum type",
    "PJRT_AsyncHostToDeviceTransferManager_TransferLiteral_Args": (
        "ptr transfer_manager, int buffer_index, ptr data, ptr shape_dims, size shape_num_dims, "
        "enum shape_element_type, ptr shape_layout, ptr done_with_h2d_transfer"
    ),
    "PJRT_Client_CreateUninitializedBuffer_Args": (
        "ptr client, ptr shape_dims, size shape_num_dims, enum shape_element_type, "
        "ptr shape_layout, ptr device, ptr memory, ptr buffer"
    ),
    "PJRT_Client_CreateErrorBuffer_Args": (
        "ptr client, enum error_code, str error_message, size error_message_size, "
        "ptr shape_dims, size shape_num_dims, enum shape_element_type, ptr shape_layout, "
        "ptr memory, ptr buffer"
    ),
    "PJRT_Client_CreateAliasBuffer_Args": (
        "ptr client, ptr memory, ptr shape_dims, size shape_num_dims, enum shape_element_type, "
        "ptr shape_layout, ptr alias_buffer, ptr fulfill_alias_buffer_cb"
    ),
    "PJRT_Client_FulfillAliasBuffer_Args": (
        "ptr client, ptr buffer, enum status_code, str error_message, size error_message_size, "
        "ptr fulfill_alias_buffer_cb"
    ),
    "PJRT_Client_BufferFromHostBuffer_Args": (
        "ptr client, ptr data, enum type, ptr dims, size num_dims, ptr byte_strides, "
        "size num_byte_strides, enum host_buffer_semantics, ptr device, ptr memory, "
        "ptr device_layout, ptr done_with_host_buffer, ptr buffer"
    ),
    "PJRT_Client_CreateViewOfDeviceBuffer_Args": (
        "ptr client, ptr device_buffer_ptr, ptr dims, size num_dims, enum element_type, "
        "ptr layout, ptr device, fn on_delete_callback, ptr on_delete_callback_arg, "
        "iptr stream, ptr buffer, ptr memory"
    ),
    "PJRT_ShapeSpec": "ptr dims, size num_dims, enum element_type",
    "PJRT_Client_CreateBuffersForAsyncHostToDevice_Args": (
        "ptr client, ptr shape_specs, size num_shape_specs, ptr device_layouts, "
        "size num_device_layouts, ptr memory, ptr transfer_manager"
    ),
    "PJRT_DeviceDescription_Id_Args": "ptr device_description, int id",
    "PJRT_DeviceDescription_ProcessIndex_Args": "ptr device_description, int process_index",
    "PJRT_DeviceDescription_Attributes_Args": (
        "ptr device_description, size num_attributes, ptr attributes"
    ),
    "PJRT_DeviceDescription_Kind_Args": (
        "ptr device_description, str device_kind, size device_kind_size"
    ),
    "PJRT_DeviceDescription_DebugString_Args": (
        "ptr device_description, str debug_string, size debug_string_size"
    ),
    "PJRT_DeviceDescription_ToString_Args": (
        "ptr device_description, str to_string, size to_string_size"
    ),
    "PJRT_Device_GetDescription_Args": "ptr device, ptr device_description",
    "PJRT_Device_IsAddressable_Args": "ptr device, bool is_addressable",
    "PJRT_Device_LocalHardwareId_Args": "ptr device, int local_hardware_id",
    "PJRT_Device_AddressableMemories_Args": "ptr device, ptr memories, size num_memories",
    "PJRT_Device_DefaultMemory_Args": "ptr device, ptr memory",
    "PJRT_Device_MemoryStats_Args": (
        "ptr device, i64 bytes_in_use, i64 peak_bytes_in_use, bool peak_bytes_in_use_is_set, "
        "i64 num_allocs, bool num_allocs_is_set, i64 largest_alloc_size, "
        "bool largest_alloc_size_is_set, i64 bytes_limit, bool bytes_limit_is_set, "
        "i64 bytes_reserved, bool bytes_reserved_is_set, i64 peak_bytes_reserved, "
        "bool peak_bytes_reserved_is_set, i64 bytes_reservable_limit, "
        "bool bytes_reservable_limit_is_set, i64 largest_free_block_bytes, "
        "bool largest_free_block_bytes_is_set, i64 pool_bytes, bool pool_bytes_is_set, "
        "i64 peak_pool_bytes, bool peak_pool_bytes_is_set"
    ),
    "PJRT_Device_PoisonExecution_Args": (
        "ptr device, i32 launch_id, enum error_code, str error_message, "
        "size error_message_size, bool poisoned"
    ),
    "PJRT_Device_CreateAsyncTrackingEvent_Args": (
        "ptr device, str description, size description_size, ptr event"
    ),
    "PJRT_AsyncTrackingEvent_Destroy_Args": "ptr event",
    "PJRT_Memory_Id_Args": "ptr memory, int id",
    "PJRT_Memory_Kind_Args": "ptr memory, str kind, size kind_size",
    "PJRT_Memory_Kind_Id_Args": "ptr memory, int kind_id",
    "PJRT_Memory_DebugString_Args": "ptr memory, str debug_string, size debug_string_size",
    "PJRT_Memory_ToString_Args": "ptr memory, str to_string, size to_string_size",
    "PJRT_Memory_AddressableByDevices_Args": "ptr memory, ptr devices, size num_devices",
    "PJRT_ExecuteContext_Create_Args": "ptr context",
    "PJRT_ExecuteContext_Destroy_Args": "ptr context",
    "PJRT_Executable_Destroy_Args": "ptr executable",
    "PJRT_LoadedExecutable_Destroy_Args": "ptr executable",
    "PJRT_LoadedExecutable_GetExecutable_Args": "ptr loaded_executable, ptr executable",
    "PJRT_LoadedExecutable_GetDeviceAssignment_Args": (
        "ptr executable, str serialized_bytes, size serialized_bytes_size, "
        "ptr serialized_device_assignment, fn serialized_device_assignment_deleter"
    ),
    "PJRT_Executable_Name_Args": "ptr executable, str executable_name, size executable_name_size",
    "PJRT_Executable_NumReplicas_Args": "ptr executable, size num_replicas",
    "PJRT_Executable_NumPartitions_Args": "ptr executable, size num_partitions",
    "PJRT_LoadedExecutable_AddressableDevices_Args": (
        "ptr executable, ptr addressable_devices, size num_addressable_devices"
    ),
    "PJRT_Executable_OptimizedProgram_Args": "ptr executable, ptr program",
    "PJRT_LoadedExecutable_Delete_Args": "ptr executable",
    "PJRT_LoadedExecutable_IsDeleted_Args": "ptr executable, bool is_deleted",
    "PJRT_ExecuteOptions": (
        "ptr send_callbacks, ptr recv_callbacks, size num_send_ops, size num_recv_ops, "
        "int launch_id, ptr non_donatable_input_indices, size num_non_donatable_input_indices, "
        "ptr context, str call_location, size num_tasks, ptr task_ids, ptr incarnation_ids"
    ),
    "PJRT_LoadedExecutable_Execute_Args": (
        "ptr executable, ptr options, ptr argument_lists, size num_devices, size num_args, "
        "ptr output_lists, ptr device_complete_events, ptr execute_device"
    ),
    "PJRT_Executable_NumOutputs_Args": "ptr executable, size num_outputs",
    "PJRT_Executable_SizeOfGeneratedCodeInBytes_Args": "ptr executable, i64 size_in_bytes",
    "PJRT_Executable_Fingerprint_Args": (
        "ptr executable, str executable_fingerprint, size executable_fingerprint_size"
    ),
    "PJRT_Executable_GetCostAnalysis_Args": "ptr executable, size num_properties, ptr properties",
    "PJRT_Executable_GetCompiledMemoryStats_Args": (
        "ptr executable, i64 generated_code_size_in_bytes, i64 argument_size_in_bytes, "
        "i64 output_size_in_bytes, i64 alias_size_in_bytes, i64 temp_size_in_bytes, "
        "i64 host_generated_code_size_in_bytes, i64 host_argument_size_in_bytes, "
        "i64 host_output_size_in_bytes, i64 host_alias_size_in_bytes, "
        "i64 host_temp_size_in_bytes, i64 peak_memory_in_bytes, i64 total_size_in_bytes"
    ),
    "PJRT_Executable_OutputElementTypes_Args": (
        "ptr executable, ptr output_types, size num_output_types"
    ),
    "PJRT_Executable_OutputDimensions_Args": (
        "ptr executable, size num_outputs, ptr dims, ptr dim_sizes"
    ),
    "PJRT_Executable_OutputMemoryKinds_Args": (
        "ptr executable, size num_outputs, ptr memory_kinds, ptr memory_kind_sizes"
    ),
    "PJRT_Executable_Serialize_Args": (
        "ptr executable, str serialized_bytes, size serialized_bytes_size, "
        "ptr serialized_executable, fn serialized_executable_deleter"
    ),
    "PJRT_Executable_GetCompileOptions_Args": (
        "ptr executable, str serialized_bytes, size serialized_bytes_size, "
        "ptr serialized_compile_options, fn serialized_compile_options_deleter"
    ),
    "PJRT_Executable_DeserializeAndLoad_Args": (
        "ptr client, str serialized_executable, size serialized_executable_size, "
        "ptr loaded_executable, str overridden_serialized_compile_options, "
        "size overridden_serialized_compile_options_size"
    ),
    "PJRT_LoadedExecutable_Fingerprint_Args": (
        "ptr executable, str executable_fingerprint, size executable_fingerprint_size"
    ),
    "PJRT_Buffer_Destroy_Args": "ptr buffer",
    "PJRT_Buffer_ElementType_Args": "ptr buffer, enum type",
    "PJRT_Buffer_Dimensions_Args": "ptr buffer, ptr dims, size num_dims",
    "PJRT_Buffer_UnpaddedDimensions_Args": "ptr buffer, ptr unpadded_dims, size num_dims",
    "PJRT_Buffer_DynamicDimensionIndices_Args": (
        "ptr buffer, ptr dynamic_dim_indices, size num_dynamic_dims"
    ),
    "PJRT_Buffer_GetMemoryLayout_Args": "ptr buffer, PJRT_Buffer_MemoryLayout layout",
    "PJRT_Buffer_ToHostBuffer_Args": (
        "ptr src, ptr host_layout, ptr dst, size dst_size, ptr event"
    ),
    "PJRT_Buffer_OnDeviceSizeInBytes_Args": "ptr buffer, size on_device_size_in_bytes",
    "PJRT_Buffer_Delete_Args": "ptr buffer",
    "PJRT_Buffer_IsDeleted_Args": "ptr buffer, bool is_deleted",
    "PJRT_Buffer_CopyRawToHost_Args": (
        "ptr buffer, ptr dst, i64 offset, i64 transfer_size, ptr event"
    ),
    "PJRT_Buffer_CopyRawToHostFuture_Args": (
        "ptr buffer, i64 offset, i64 transfer_size, ptr event, ptr callback_data, "
        "fn future_ready_callback"
    ),
    "PJRT_Buffer_CopyToDevice_Args": "ptr buffer, ptr dst_device, ptr dst_buffer",
    "PJRT_Buffer_CopyToMemory_Args": "ptr buffer, ptr dst_memory, ptr dst_buffer",
    "PJRT_Buffer_IsOnCpu_Args": "ptr buffer, bool is_on_cpu",
    "PJRT_Buffer_Device_Args": "ptr buffer, ptr device",
    "PJRT_Buffer_Memory_Args": "ptr buffer, ptr memory",
    "PJRT_Buffer_ReadyEvent_Args": "ptr buffer, ptr event",
    "PJRT_Buffer_UnsafePointer_Args": "ptr buffer, uptr buffer_pointer",
    "PJRT_Buffer_IncreaseExternalReferenceCount_Args": "ptr buffer",
    "PJRT_Buffer_DecreaseExternalReferenceCount_Args": "ptr buffer",
    "PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args": "ptr buffer, ptr device_memory_ptr",
    "PJRT_Buffer_DonateWithControlDependency_Args": (
        "ptr buffer, ptr callback_data, fn dependency_ready_callback, ptr out_buffer"
    ),
    "PJRT_CopyToDeviceStream_Destroy_Args": "ptr stream",
    "PJRT_CopyToDeviceStream_AddChunk_Args": "ptr stream, ptr chunk, ptr transfer_complete",
    "PJRT_CopyToDeviceStream_TotalBytes_Args": "ptr stream, i64 total_bytes",
    "PJRT_CopyToDeviceStream_GranuleSize_Args": "ptr stream, i64 granule_size_in_bytes",
    "PJRT_CopyToDeviceStream_CurrentBytes_Args": "ptr stream, i64 current_bytes",
    "PJRT_TopologyDescription_Create_Args": (
        "str topology_name, size topology_name_size, ptr create_options, size num_options, "
        "ptr topology"
    ),
    "PJRT_TopologyDescription_Destroy_Args": "ptr topology",
    "PJRT_TopologyDescription_PlatformVersion_Args": (
        "ptr topology, str platform_version, size platform_version_size"
    ),
    "PJRT_TopologyDescription_PlatformName_Args": (
        "ptr topology, str platform_name, size platform_name_size"
    ),
    "PJRT_TopologyDescription_GetDeviceDescriptions_Args": (
        "ptr topology, ptr descriptions, size num_descriptions"
    ),
    "PJRT_TopologyDescription_Serialize_Args": (
        "ptr topology, str serialized_bytes, size serialized_bytes_size, "
        "ptr serialized_topology, fn serialized_topology_deleter"
    ),
    "PJRT_TopologyDescription_Deserialize_Args": (
        "str serialized_topology, size serialized_topology_size, ptr topology"
    ),
    "PJRT_TopologyDescription_Attributes_Args": (
        "ptr topology, ptr attributes, size num_attributes"
    ),
    "PJRT_Compile_Args": (
        "ptr topology, ptr program, str compile_options, size compile_options_size, ptr client, "
        "ptr executable"
    ),
}

# Arguments of the functions of `EXTENSIONS`, which begin like those in `STRUCTS`.
EXTENSION_STRUCTS: dict[str, str] = {
    # pjrt_c_api_cross_host_transfers_extension.h, version 5. Device ids are 32 bits wide, keys 64.
    "PJRT_Transfers_PJRT_Client_CrossHostSendBuffers_Args": (
        "ptr client, size num_buffers, ptr buffers, ptr dst_global_device_ids, ptr transfer_keys, "
        "ptr send_events"
    ),
    "PJRT_Transfers_PJRT_Client_CrossHostReceiveBuffers_Args": (
        "ptr client, size num_shapes, ptr shape_num_dims, ptr num_dims, ptr element_types, ptr layouts, "
        "ptr device, ptr src_global_device_ids, ptr transfer_keys, ptr buffers"
    ),
    # pjrt_c_api_shardings_extension.h, version 1.
    "PJRT_Shardings_PJRT_Executable_ParameterShardings_Args": (
        "ptr executable, size num_parameters, ptr shardings, ptr sharding_sizes"
    ),
    "PJRT_Shardings_PJRT_Executable_OutputShardings_Args": (
        "ptr executable, size num_outputs, ptr shardings, ptr sharding_sizes"
    ),
}

# The same for structs that begin with their size alone: ``xla/backends/profiler/plugin/profiler_c_api.h``.
EXTENSION_PLAIN: dict[str, str] = {
    "PLUGIN_Profiler_Create_Args": "size struct_size, str options, size options_size, ptr profiler",
    "PLUGIN_Profiler_Destroy_Args": "size struct_size, ptr profiler",
    "PLUGIN_Profiler_Start_Args": "size struct_size, ptr profiler",
    "PLUGIN_Profiler_Stop_Args": "size struct_size, ptr profiler",
    "PLUGIN_Profiler_CollectData_Args": (
        "size struct_size, ptr profiler, ptr buffer, size buffer_size_in_bytes"
    ),
    # `tail` is zeros: later versions have more functions.
    "PLUGIN_Profiler_Api": (
        "size struct_size, ptr priv, fn error_destroy, fn error_message, fn error_get_code, fn create, "
        "fn destroy, fn start, fn stop, fn collect_data, u64 tail0, u64 tail1, u64 tail2, u64 tail3"
    ),
    "PJRT_Profiler_Extension": (
        "PJRT_Extension_Base base, ptr profiler_api, i64 traceme_context_id"
    ),
}

# Type (PJRT_Extension_Type) and functions of each table.
EXTENSIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    "PJRT_CrossHostTransfers_Extension": (
        12,
        (
            "PJRT_Transfers_PJRT_Client_MakeCrossHostReceiveBuffers",
            "PJRT_Transfers_PJRT_Buffer_CopyToRemoteDevice",
            "PJRT_Transfers_PJRT_Client_CrossHostReceiveBuffers",
            "PJRT_Transfers_PJRT_Client_CrossHostSendBuffers",
        ),
    ),
    "PJRT_Shardings_Extension": (
        19,
        (
            "PJRT_Shardings_PJRT_Executable_ParameterShardings",
            "PJRT_Shardings_PJRT_Executable_OutputShardings",
        ),
    ),
}

FUNCTIONS: tuple[str, ...] = (
    "PJRT_Error_Destroy",
    "PJRT_Error_Message",
    "PJRT_Error_GetCode",
    "PJRT_Plugin_Initialize",
    "PJRT_Plugin_Attributes",
    "PJRT_Event_Destroy",
    "PJRT_Event_IsReady",
    "PJRT_Event_Error",
    "PJRT_Event_Await",
    "PJRT_Event_OnReady",
    "PJRT_Client_Create",
    "PJRT_Client_Destroy",
    "PJRT_Client_PlatformName",
    "PJRT_Client_ProcessIndex",
    "PJRT_Client_PlatformVersion",
    "PJRT_Client_Devices",
    "PJRT_Client_AddressableDevices",
    "PJRT_Client_LookupDevice",
    "PJRT_Client_LookupAddressableDevice",
    "PJRT_Client_AddressableMemories",
    "PJRT_Client_Compile",
    "PJRT_Client_DefaultDeviceAssignment",
    "PJRT_Client_BufferFromHostBuffer",
    "PJRT_DeviceDescription_Id",
    "PJRT_DeviceDescription_ProcessIndex",
    "PJRT_DeviceDescription_Attributes",
    "PJRT_DeviceDescription_Kind",
    "PJRT_DeviceDescription_DebugString",
    "PJRT_DeviceDescription_ToString",
    "PJRT_Device_GetDescription",
    "PJRT_Device_IsAddressable",
    "PJRT_Device_LocalHardwareId",
    "PJRT_Device_AddressableMemories",
    "PJRT_Device_DefaultMemory",
    "PJRT_Device_MemoryStats",
    "PJRT_Memory_Id",
    "PJRT_Memory_Kind",
    "PJRT_Memory_DebugString",
    "PJRT_Memory_ToString",
    "PJRT_Memory_AddressableByDevices",
    "PJRT_Executable_Destroy",
    "PJRT_Executable_Name",
    "PJRT_Executable_NumReplicas",
    "PJRT_Executable_NumPartitions",
    "PJRT_Executable_NumOutputs",
    "PJRT_Executable_SizeOfGeneratedCodeInBytes",
    "PJRT_Executable_GetCostAnalysis",
    "PJRT_Executable_OutputMemoryKinds",
    "PJRT_Executable_OptimizedProgram",
    "PJRT_Executable_Serialize",
    "PJRT_LoadedExecutable_Destroy",
    "PJRT_LoadedExecutable_GetExecutable",
    "PJRT_LoadedExecutable_AddressableDevices",
    "PJRT_LoadedExecutable_Delete",
    "PJRT_LoadedExecutable_IsDeleted",
    "PJRT_LoadedExecutable_Execute",
    "PJRT_Executable_DeserializeAndLoad",
    "PJRT_LoadedExecutable_Fingerprint",
    "PJRT_Buffer_Destroy",
    "PJRT_Buffer_ElementType",
    "PJRT_Buffer_Dimensions",
    "PJRT_Buffer_UnpaddedDimensions",
    "PJRT_Buffer_DynamicDimensionIndices",
    "PJRT_Buffer_GetMemoryLayout",
    "PJRT_Buffer_OnDeviceSizeInBytes",
    "PJRT_Buffer_Device",
    "PJRT_Buffer_Memory",
    "PJRT_Buffer_Delete",
    "PJRT_Buffer_IsDeleted",
    "PJRT_Buffer_CopyToDevice",
    "PJRT_Buffer_ToHostBuffer",
    "PJRT_Buffer_IsOnCpu",
    "PJRT_Buffer_ReadyEvent",
    "PJRT_Buffer_UnsafePointer",
    "PJRT_Buffer_IncreaseExternalReferenceCount",
    "PJRT_Buffer_DecreaseExternalReferenceCount",
    "PJRT_Buffer_OpaqueDeviceMemoryDataPointer",
    "PJRT_CopyToDeviceStream_Destroy",
    "PJRT_CopyToDeviceStream_AddChunk",
    "PJRT_CopyToDeviceStream_TotalBytes",
    "PJRT_CopyToDeviceStream_GranuleSize",
    "PJRT_CopyToDeviceStream_CurrentBytes",
    "PJRT_TopologyDescription_Create",
    "PJRT_TopologyDescription_Destroy",
    "PJRT_TopologyDescription_PlatformName",
    "PJRT_TopologyDescription_PlatformVersion",
    "PJRT_TopologyDescription_GetDeviceDescriptions",
    "PJRT_TopologyDescription_Serialize",
    "PJRT_TopologyDescription_Attributes",
    "PJRT_Compile",
    "PJRT_Executable_OutputElementTypes",
    "PJRT_Executable_OutputDimensions",
    "PJRT_Buffer_CopyToMemory",
    "PJRT_Client_CreateViewOfDeviceBuffer",
    "PJRT_Executable_Fingerprint",
    "PJRT_Client_TopologyDescription",
    "PJRT_Executable_GetCompiledMemoryStats",
    "PJRT_Memory_Kind_Id",
    "PJRT_ExecuteContext_Create",
    "PJRT_ExecuteContext_Destroy",
    "PJRT_Buffer_CopyRawToHost",
    "PJRT_AsyncHostToDeviceTransferManager_Destroy",
    "PJRT_AsyncHostToDeviceTransferManager_TransferData",
    "PJRT_Client_CreateBuffersForAsyncHostToDevice",
    "PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer",
    "PJRT_AsyncHostToDeviceTransferManager_Device",
    "PJRT_AsyncHostToDeviceTransferManager_BufferCount",
    "PJRT_AsyncHostToDeviceTransferManager_BufferSize",
    "PJRT_AsyncHostToDeviceTransferManager_SetBufferError",
    "PJRT_AsyncHostToDeviceTransferManager_AddMetadata",
    "PJRT_Client_DmaMap",
    "PJRT_Client_DmaUnmap",
    "PJRT_Client_CreateUninitializedBuffer",
    "PJRT_Client_UpdateGlobalProcessInfo",
    "PJRT_TopologyDescription_Deserialize",
    "PJRT_Client_CreateAliasBuffer",
    "PJRT_Client_FulfillAliasBuffer",
    "PJRT_LoadedExecutable_GetDeviceAssignment",
    "PJRT_Client_CreateErrorBuffer",
    "PJRT_AsyncHostToDeviceTransferManager_TransferLiteral",
    "PJRT_Buffer_CopyRawToHostFuture",
    "PJRT_Device_PoisonExecution",
    "PJRT_Device_CreateAsyncTrackingEvent",
    "PJRT_AsyncTrackingEvent_Destroy",
    "PJRT_Executable_GetCompileOptions",
    "PJRT_Buffer_DonateWithControlDependency",
    "PJRT_Event_Create",
    "PJRT_Event_Set",
)

_TYPES = """
invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 bf16 c64 c128 f8e5m2 f8e4m3fn f8e4m3b11fnuz
f8e5m2fnuz f8e4m3fnuz s4 u4 token s2 u2 f8e4m3 f8e3m4 f8e8m0fnu f4e2m1fn
"""
_CODES = """
OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED
RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS
UNAUTHENTICATED
"""

# PJRT_Buffer_Type by the name of the element type, PJRT_Error_Code by the name of the absl status.
BUFFER_TYPES: dict[str, int] = {name: code for code, name in enumerate(_TYPES.split())}
ERROR_CODES: dict[str, int] = {name: code for code, name in enumerate(_CODES.split())}

# Of the functions in PLUGIN_Profiler_Api those that are not answered in C.
PROFILER_FUNCTIONS: tuple[str, ...] = (
    "PLUGIN_Profiler_Create",
    "PLUGIN_Profiler_Start",
    "PLUGIN_Profiler_Stop",
    "PLUGIN_Profiler_CollectData",
)

# All functions, of extensions too: a function's place is its number.
ALL_FUNCTIONS: tuple[str, ...] = (
    *FUNCTIONS,
    *(name for _, functions in EXTENSIONS.values() for name in functions),
    *PROFILER_FUNCTIONS,
)

# PJRT_NamedValue_Type
STRING, INT64, INT64_LIST, FLOAT, BOOL = range(5)

# PJRT_HostBufferSemantics
ONLY_DURING_CALL, UNTIL_TRANSFER_COMPLETES, ZERO_COPY, MUTABLE_ZERO_COPY = range(4)

# PJRT_Buffer_MemoryLayout_Type
TILED, STRIDES = range(2)


def fields(line: str) -> list[tuple[str, str]]:
    """(type, name) of each field of a line of the tables."""
    return [(kind, name) for kind, name in (f.split() for f in line.split(",") if f.strip())]


def layouts() -> dict[str, list[tuple[str, str]]]:
    """Fields of every union and struct, in an order in which what is held in place comes first."""
    unions = {name: fields(line) for name, line in UNIONS.items()}
    rest = {name: fields(line) for name, line in (PLAIN | EXTENSION_PLAIN).items()} | {
        name: fields(f"{HEAD}, {line}") for name, line in (STRUCTS | EXTENSION_STRUCTS).items()
    }
    ordered: dict[str, list[tuple[str, str]]] = {}

    def add(name: str) -> None:
        if name in ordered:
            return
        listed = unions[name] if name in unions else rest[name]
        for kind, _ in listed:
            if kind in unions or kind in rest:
                add(kind)
        ordered[name] = listed

    for name in (*unions, *rest):
        add(name)
    return ordered
