"""The parts of XLA's protobuf messages that stretto reads, built when this file is imported.

Invariants: numbers and types are XLA's (``xla/service/hlo.proto``, ``xla/xla_data.proto``,
``xla/xla.proto``, ``xla/pjrt/proto/compile_options.proto``); a test compares them with the
descriptors embedded in jaxlib. Fields that are not listed survive a round trip as unknown fields, so
instructions move verbatim from one module to another. Fields that are only carried along (literals,
shardings) are listed as ``bytes``, which is the same on the wire and costs no parsing.

The messages live in a descriptor pool of their own and collide with no other user of protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "stretto.xla"

# Message -> "name:number:type", separated by blanks. A star repeats the field, "map" is a map of
# strings to strings, a capital letter names another message, a slash puts the field in a oneof.
TABLE: dict[str, str] = {
    "HloModuleProto": (
        "name:1:string entry_computation_name:2:string computations:3:HloComputationProto* "
        "host_program_shape:4:ProgramShapeProto id:5:int64 entry_computation_id:6:int64 "
        "schedule:7:bytes input_output_alias:8:HloInputOutputAliasProto is_dynamic:11:bool "
        "spmd_output_sharding:12:OpSharding spmd_parameters_shardings:14:bytes* "
        "device_assignment:15:bytes stack_frame_index:17:StackFrameIndexProto "
        "buffer_donor:18:HloBufferDonorProto payloads:22:bytes*"
    ),
    "HloComputationProto": (
        "name:1:string instructions:2:HloInstructionProto* program_shape:4:ProgramShapeProto "
        "id:5:int64 root_id:6:int64 is_fusion_computation:7:bool execution_thread:8:string"
    ),
    "HloInstructionProto": (
        "name:1:string opcode:2:string shape:3:ShapeProto metadata:7:OpMetadata literal:8:bytes "
        "parameter_number:9:int64 fusion_kind:11:string tuple_index:13:int64 dimensions:14:int64* "
        "slice_dimensions:17:SliceDimensions* exponent_bits:18:int32 mantissa_bits:19:int32 "
        "padding_config:21:PaddingConfig "
        "window:15:Window convolution_dimension_numbers:16:ConvolutionDimensionNumbers "
        "dynamic_slice_sizes:20:int64* channel_id:26:int64 custom_call_target:28:string "
        "fft_type:31:int32 fft_length:32:int64* "
        "gather_dimension_numbers:33:GatherDimensionNumbers gather_slice_sizes:34:int64* "
        "scatter_dimension_numbers:48:ScatterDimensionNumbers feature_group_count:50:int64 "
        "batch_group_count:58:int64 triangular_solve_options:59:TriangularSolveOptions "
        "dot_dimension_numbers:30:DotDimensionNumbers comparison_direction:63:string "
        "comparison_type:72:string is_stable:60:bool k:81:int64 largest:85:bool "
        "id:35:int64 operand_ids:36:int64* control_predecessor_ids:37:int64* "
        "called_computation_ids:38:int64* sharding:40:bytes backend_config:43:bytes "
        "is_host_transfer:47:bool replica_groups:49:ReplicaGroup* "
        "source_target_pairs:52:SourceTarget* operand_shapes_with_layout:57:ShapeProto* "
        "custom_call_has_side_effect:65:bool frontend_attributes:68:FrontendAttributes "
        "use_global_device_ids:71:bool statistics_viz:82:bytes "
        "collective_device_list:87:CollectiveDeviceListProto/ original_value:88:bytes "
        "is_composite:89:bool "
        "iota_collective_device_list:92:IotaReplicaGroupListProto/ "
        "mesh_axes_replica_group_list:93:MeshAxesReplicaGroupListProto/ "
        "backend_config_payload:99:Payload has_dynamic_root:100:bool"
    ),
    "DotDimensionNumbers": (
        "lhs_contracting_dimensions:1:int64* rhs_contracting_dimensions:2:int64* "
        "lhs_batch_dimensions:3:int64* rhs_batch_dimensions:4:int64*"
    ),
    "ConvolutionDimensionNumbers": (
        "kernel_input_feature_dimension:3:int64 kernel_output_feature_dimension:4:int64 "
        "input_batch_dimension:7:int64 input_feature_dimension:8:int64 "
        "output_batch_dimension:9:int64 output_feature_dimension:10:int64 "
        "input_spatial_dimensions:11:int64* output_spatial_dimensions:12:int64*"
    ),
    "GatherDimensionNumbers": (
        "offset_dims:1:int64* collapsed_slice_dims:2:int64* start_index_map:3:int64* "
        "index_vector_dim:4:int64 operand_batching_dims:5:int64* "
        "start_indices_batching_dims:6:int64*"
    ),
    "ScatterDimensionNumbers": (
        "update_window_dims:1:int64* inserted_window_dims:2:int64* "
        "scatter_dims_to_operand_dims:3:int64* index_vector_dim:4:int64 "
        "input_batching_dims:5:int64* scatter_indices_batching_dims:6:int64*"
    ),
    "TriangularSolveOptions": "left_side:1:bool",
    "Window": "dimensions:1:WindowDimension*",
    "WindowDimension": (
        "size:1:int64 stride:2:int64 padding_low:3:int64 padding_high:4:int64 window_dilation:5:int64 "
        "base_dilation:6:int64"
    ),
    "OpSharding": (
        "type:1:int32 tile_assignment_dimensions:3:int64* tile_assignment_devices:4:int64* "
        "tuple_shardings:5:OpSharding* replicate_on_last_tile_dim:6:bool metadata:7:OpMetadata* "
        "last_tile_dims:8:int32* iota_reshape_dims:9:int64* iota_transpose_perm:10:int32* "
        "named_sharding:14:NamedShardingProto"
    ),
    "NamedShardingProto": (
        "mesh:2:MeshProto dim_shardings:3:DimensionSharding* replicated_axes:4:AxisRefProto* "
        "unreduced_axes:5:AxisRefProto* metadata:6:OpMetadata* manual_axes:7:AxisRefProto*"
    ),
    "DimensionSharding": "axes:1:AxisRefProto* is_closed:2:bool",
    "SliceDimensions": "start:1:int64 limit:2:int64 stride:3:int64",
    "PaddingConfig": "dimensions:1:PaddingConfigDimension*",
    "PaddingConfigDimension": (
        "edge_padding_low:1:int64 edge_padding_high:2:int64 interior_padding:3:int64"
    ),
    "Payload": "value:1:bytes/ id:2:int64/",
    "ReplicaGroup": "replica_ids:1:int64*",
    "SourceTarget": "source:1:int64 target:2:int64",
    "CollectiveDeviceListProto": "replica_groups:1:ReplicaGroup*",
    "IotaReplicaGroupListProto": (
        "num_replica_groups:1:int64 num_devices_per_group:2:int64 iota_reshape_dims:3:int64* "
        "iota_transpose_perm:4:int32*"
    ),
    "MeshAxesReplicaGroupListProto": "mesh:1:MeshProto axes:2:AxisRefProto*",
    "MeshProto": "axes:1:MeshAxis* device_ids:2:int64* iota_transform:3:IotaTransform",
    "MeshAxis": "name:1:string size:2:int64",
    "IotaTransform": "reshape_dims:1:int64* transpose_perm:2:int64*",
    "AxisRefProto": "mesh_axis_index:1:int64 sub_axis_info:2:SubAxis",
    "SubAxis": "pre_size:1:int64 size:2:int64",
    "FrontendAttributes": "map:1:map",
    "ShapeProto": (
        "element_type:2:int32 dimensions:3:int64* tuple_shapes:4:ShapeProto* layout:5:LayoutProto "
        "is_dynamic_dimension:6:bool*"
    ),
    "LayoutProto": "minor_to_major:1:int64* tiles:6:bytes* element_size_in_bits:7:int64",
    "ProgramShapeProto": "parameters:1:ShapeProto* result:2:ShapeProto parameter_names:3:string*",
    "OpMetadata": (
        "op_type:1:string op_name:2:string source_file:3:string source_line:4:int32 "
        "stack_frame_id:15:int32"
    ),
    "StackFrameIndexProto": (
        "file_names:1:string* function_names:2:string* file_locations:3:FileLocation* "
        "stack_frames:4:StackFrame*"
    ),
    "FileLocation": "file_name_id:1:int32 function_name_id:2:int32 line:3:int32",
    "StackFrame": "file_location_id:1:int32 parent_frame_id:2:int32",
    "HloInputOutputAliasProto": "entries:1:AliasEntryProto*",
    "AliasEntryProto": (
        "output_shape_index:1:int64* parameter_number:2:int64 parameter_shape_index:3:int64* "
        "kind:4:int32"
    ),
    "HloBufferDonorProto": "entries:1:BufferDonorEntryProto*",
    "BufferDonorEntryProto": "parameter_number:1:int64 parameter_shape_index:2:int64*",
    "HloModuleConfigProto": (
        "entry_computation_layout:1:ProgramShapeProto replica_count:4:int64 "
        "num_partitions:5:int64 use_spmd_partitioning:7:bool static_device_assignment:15:bytes "
        "use_shardy_partitioner:34:bool"
    ),
    "HloModuleProtoWithConfig": "hlo_module:1:HloModuleProto config:2:HloModuleConfigProto",
    "LiteralProto": (
        "shape:1:ShapeProto preds:2:bool* u8s:3:bytes s32s:4:int32* s64s:5:int64* u32s:6:uint32* "
        "u64s:7:uint64* f32s:8:float* f64s:9:double* f16s:11:bytes c64s:12:float* bf16s:13:bytes "
        "s8s:15:bytes u16s:16:bytes s16s:17:bytes c128s:18:double* f8e5m2s:19:bytes "
        "f8e4m3fns:20:bytes s4s:21:bytes u4s:22:bytes f8e4m3b11fnuzs:23:bytes f8e5m2fnuzs:24:bytes "
        "f8e4m3fnuzs:25:bytes s2s:26:bytes u2s:27:bytes f8e4m3s:28:bytes f8e3m4s:29:bytes "
        "s1s:30:bytes u1s:31:bytes f4e2m1fns:32:bytes f8e8m0fnus:33:bytes"
    ),
    "CompileOptionsProto": (
        "argument_layouts:1:bytes* executable_build_options:3:ExecutableBuildOptionsProto "
        "compile_portable_executable:4:bool env_option_overrides:7:EnvOptionOverridesEntry*"
    ),
    "ExecutableBuildOptionsProto": (
        "device_ordinal:1:int64 result_layout:2:bytes num_replicas:4:int64 num_partitions:5:int64 "
        "use_spmd_partitioning:6:bool device_assignment:9:bytes use_shardy_partitioner:19:bool "
        "process_index:22:int64 process_count:23:int64"
    ),
    "EnvOptionOverridesEntry": "key:1:string value:2:OptionOverrideProto",
    "OptionOverrideProto": "string_field:1:string/ bool_field:2:bool/ int_field:3:int64/",
    "DeviceAssignmentProto": (
        "replica_count:1:int32 computation_count:2:int32 computation_devices:3:ComputationDevice*"
    ),
    "ComputationDevice": "replica_device_ids:1:int64*",
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
}


def _add_field(message: descriptor_pb2.DescriptorProto, spec: str) -> None:
    name, number, kind = spec.split(":")
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind == "map":
        entry = message.nested_type.add(name="MapEntry")
        entry.options.map_entry = True
        for key, key_number in (("key", 1), ("value", 2)):
            entry.field.add(
                name=key,
                number=key_number,
                type=_Field.TYPE_STRING,
                label=_Field.LABEL_OPTIONAL,
            )
        field.label = _Field.LABEL_REPEATED
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.MapEntry"
        return
    if kind.endswith("*"):
        field.label = _Field.LABEL_REPEATED
    if kind.endswith("/"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="one_of")
        field.oneof_index = 0
    kind = kind.rstrip("*/")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


def messages(table: Mapping[str, str]) -> dict[str, Any]:
    """The classes of the messages in a table like `TABLE`, in a pool of their own."""
    file = descriptor_pb2.FileDescriptorProto(
        name="stretto/xla.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for spec in fields.split():
            _add_field(message, spec)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in table
    }


_MESSAGES = messages(TABLE)

HloModuleProto: Any = _MESSAGES["HloModuleProto"]
HloComputationProto: Any = _MESSAGES["HloComputationProto"]
HloInstructionProto: Any = _MESSAGES["HloInstructionProto"]
HloModuleProtoWithConfig: Any = _MESSAGES["HloModuleProtoWithConfig"]
ShapeProto: Any = _MESSAGES["ShapeProto"]
ProgramShapeProto: Any = _MESSAGES["ProgramShapeProto"]
LiteralProto: Any = _MESSAGES["LiteralProto"]
CompileOptionsProto: Any = _MESSAGES["CompileOptionsProto"]
DeviceAssignmentProto: Any = _MESSAGES["DeviceAssignmentProto"]
OpSharding: Any = _MESSAGES["OpSharding"]

# XLA's PrimitiveType codes of the element types that arrays may have.
PRIMITIVE_TYPES: dict[int, str] = {
    1: "pred",
    2: "s8",
    3: "s16",
    4: "s32",
    5: "s64",
    6: "u8",
    7: "u16",
    8: "u32",
    9: "u64",
    10: "f16",
    11: "f32",
    12: "f64",
    15: "c64",
    16: "bf16",
    18: "c128",
    19: "f8e5m2",
    20: "f8e4m3fn",
    21: "s4",
    22: "u4",
    23: "f8e4m3b11fnuz",
    24: "f8e5m2fnuz",
    25: "f8e4m3fnuz",
    26: "s2",
    27: "u2",
    28: "f8e4m3",
    29: "f8e3m4",
    32: "f4e2m1fn",
    33: "f8e8m0fnu",
}
PRIMITIVE_CODES: dict[str, int] = {name: code for code, name in PRIMITIVE_TYPES.items()}
TUPLE, OPAQUE, TOKEN = 13, 14, 17
