# Devices, which are their own descriptions, and memories. Part of `_capi`.

cdef struct text_t:
    const char* data
    size_t size

cdef struct memory_t:
    void* owner
    int id
    int kind_id
    text_t kind
    text_t debug_string
    text_t to_string
    void* device

cdef struct device_t:
    void* owner
    int id
    int process_index
    int local_hardware_id
    bint addressable
    text_t kind
    text_t debug_string
    text_t to_string
    void** memories
    size_t num_memories
    void* default_memory
    const void* attributes
    size_t num_attributes
    bint on_host


cdef text_t text_of(bytes text):
    cdef text_t result
    result.data, result.size = PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text)
    return result


cdef class Device(Handle):
    """A device of the world; also its own description. ``local_hardware_id`` is -1 on other processes."""

    cdef device_t c
    cdef tuple keep
    cdef readonly tuple memories
    cdef readonly str name
    cdef readonly object client

    def __cinit__(
        self, int id, int process_index, int local_hardware_id, str kind, str debug_string, str name,
        attributes,
    ):
        texts = (kind.encode(), debug_string.encode(), name.encode())
        self.keep = (texts, attributes)
        self.name = name
        self.c.owner = <void*>self
        self.pointer = &self.c
        self.c.id, self.c.process_index, self.c.local_hardware_id = id, process_index, local_hardware_id
        self.c.addressable = local_hardware_id >= 0
        self.c.kind, self.c.debug_string = text_of(texts[0]), text_of(texts[1])
        self.c.to_string = text_of(texts[2])
        self.c.attributes = <const void*><size_t>attributes.address
        self.c.num_attributes = attributes.count
        self.c.memories, self.c.num_memories, self.c.default_memory = NULL, 0, NULL
        self.c.on_host = False
        self.memories = ()

    def __dealloc__(self):
        free(self.c.memories)

    def attach(self, tuple memories not None):
        """Set the memories, the default one first. To be called once."""
        cdef Memory memory
        self.memories = memories
        self.c.memories = <void**>malloc(sizeof(void*) * len(memories))
        for i, memory in enumerate(memories):
            self.c.memories[i] = memory.pointer
            memory.c.device = self.pointer
        self.c.num_memories = len(memories)
        self.c.default_memory = self.c.memories[0]

    def serve(self, client, bint on_host):
        """Belong to a client from now on. ``on_host``: jaxlib may read arrays where they lie."""
        self.client, self.c.on_host = client, on_host

    @property
    def id(self):
        return self.c.id

    @property
    def process_index(self):
        return self.c.process_index

    @property
    def ordinal(self):
        return self.c.local_hardware_id


cdef class Memory(Handle):
    """A memory of one addressable device."""

    cdef memory_t c
    cdef tuple keep
    cdef readonly Device device
    cdef readonly str kind
    cdef dict scalars  # arrays of the engine, by type and bits

    def __cinit__(self, int id, int kind_id, str kind, str debug_string, str name, Device device):
        self.scalars = {}
        texts = (kind.encode(), debug_string.encode(), name.encode())
        self.keep, self.kind, self.device = texts, kind, device
        self.c.owner = <void*>self
        self.pointer = &self.c
        self.c.id, self.c.kind_id, self.c.device = id, kind_id, device.pointer
        self.c.kind, self.c.debug_string = text_of(texts[0]), text_of(texts[1])
        self.c.to_string = text_of(texts[2])

    @property
    def id(self):
        return self.c.id


cdef void* description_id(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_Id_Args* args = <PJRT_DeviceDescription_Id_Args*>a
    args.id = (<device_t*>args.device_description).id
    return NULL


cdef void* description_process_index(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_ProcessIndex_Args* args = <PJRT_DeviceDescription_ProcessIndex_Args*>a
    args.process_index = (<device_t*>args.device_description).process_index
    return NULL


cdef void* description_attributes(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_Attributes_Args* args = <PJRT_DeviceDescription_Attributes_Args*>a
    cdef device_t* device = <device_t*>args.device_description
    args.attributes, args.num_attributes = <void*>device.attributes, device.num_attributes
    return NULL


cdef void* description_kind(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_Kind_Args* args = <PJRT_DeviceDescription_Kind_Args*>a
    cdef device_t* device = <device_t*>args.device_description
    args.device_kind, args.device_kind_size = device.kind.data, device.kind.size
    return NULL


cdef void* description_debug_string(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_DebugString_Args* args = <PJRT_DeviceDescription_DebugString_Args*>a
    cdef device_t* device = <device_t*>args.device_description
    args.debug_string, args.debug_string_size = device.debug_string.data, device.debug_string.size
    return NULL


cdef void* description_to_string(void* a) noexcept nogil:
    cdef PJRT_DeviceDescription_ToString_Args* args = <PJRT_DeviceDescription_ToString_Args*>a
    cdef device_t* device = <device_t*>args.device_description
    args.to_string, args.to_string_size = device.to_string.data, device.to_string.size
    return NULL


cdef void* device_get_description(void* a) noexcept nogil:
    cdef PJRT_Device_GetDescription_Args* args = <PJRT_Device_GetDescription_Args*>a
    args.device_description = args.device
    return NULL


cdef void* device_is_addressable(void* a) noexcept nogil:
    cdef PJRT_Device_IsAddressable_Args* args = <PJRT_Device_IsAddressable_Args*>a
    args.is_addressable = (<device_t*>args.device).addressable
    return NULL


cdef void* device_local_hardware_id(void* a) noexcept nogil:
    cdef PJRT_Device_LocalHardwareId_Args* args = <PJRT_Device_LocalHardwareId_Args*>a
    args.local_hardware_id = (<device_t*>args.device).local_hardware_id
    return NULL


cdef void* device_addressable_memories(void* a) noexcept nogil:
    cdef PJRT_Device_AddressableMemories_Args* args = <PJRT_Device_AddressableMemories_Args*>a
    cdef device_t* device = <device_t*>args.device
    args.memories, args.num_memories = <void*>device.memories, device.num_memories
    return NULL


cdef void* memory_id(void* a) noexcept nogil:
    cdef PJRT_Memory_Id_Args* args = <PJRT_Memory_Id_Args*>a
    args.id = (<memory_t*>args.memory).id
    return NULL


cdef void* memory_kind(void* a) noexcept nogil:
    cdef PJRT_Memory_Kind_Args* args = <PJRT_Memory_Kind_Args*>a
    cdef memory_t* memory = <memory_t*>args.memory
    args.kind, args.kind_size = memory.kind.data, memory.kind.size
    return NULL


cdef void* memory_kind_id(void* a) noexcept nogil:
    cdef PJRT_Memory_Kind_Id_Args* args = <PJRT_Memory_Kind_Id_Args*>a
    args.kind_id = (<memory_t*>args.memory).kind_id
    return NULL


cdef void* memory_debug_string(void* a) noexcept nogil:
    cdef PJRT_Memory_DebugString_Args* args = <PJRT_Memory_DebugString_Args*>a
    cdef memory_t* memory = <memory_t*>args.memory
    args.debug_string, args.debug_string_size = memory.debug_string.data, memory.debug_string.size
    return NULL


cdef void* memory_to_string(void* a) noexcept nogil:
    cdef PJRT_Memory_ToString_Args* args = <PJRT_Memory_ToString_Args*>a
    cdef memory_t* memory = <memory_t*>args.memory
    args.to_string, args.to_string_size = memory.to_string.data, memory.to_string.size
    return NULL


cdef void* memory_addressable_by_devices(void* a) noexcept nogil:
    cdef PJRT_Memory_AddressableByDevices_Args* args = <PJRT_Memory_AddressableByDevices_Args*>a
    args.devices, args.num_devices = <void*>&(<memory_t*>args.memory).device, 1
    return NULL
