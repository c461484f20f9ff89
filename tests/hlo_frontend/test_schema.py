"""Field numbers and types against the descriptors embedded in the installed jaxlib."""

from __future__ import annotations

import mmap
from pathlib import Path

import jaxlib
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError
from jaxlib import _hlo

from stretto.hlo_frontend import schema
from stretto.hlo_frontend.text import parse_hlo_text

FILES = (
    "xla/service/hlo.proto",
    "xla/xla_data.proto",
    "xla/xla.proto",
    "xla/pjrt/proto/compile_options.proto",
)
Field = descriptor_pb2.FieldDescriptorProto


def _varint(data, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def _descriptor(data, name: str) -> descriptor_pb2.FileDescriptorProto | None:
    """The serialized FileDescriptorProto of ``name``: its end is where fields stop making sense."""
    start = data.find(b"\x0a" + bytes([len(name)]) + name.encode())
    while start >= 0:
        at, ends = start, []
        while True:
            tag, after = _varint(data, at)
            number, wire = tag >> 3, tag & 7
            if number not in range(1, 16) or (number == 1 and ends) or wire not in (0, 2):
                break
            length, after = _varint(data, after)
            at = after + length if wire == 2 else after
            if at > len(data):
                break
            ends.append(at)
        for end in reversed(ends):
            try:
                found = descriptor_pb2.FileDescriptorProto.FromString(data[start:end])
            except DecodeError:
                continue
            if found.message_type:
                return found
        start = data.find(b"\x0a" + bytes([len(name)]) + name.encode(), start + 1)
    return None


def _messages(container, into: dict) -> None:
    for message in container:
        into.setdefault(message.name, message)
        _messages(message.nested_type, into)


@pytest.fixture(scope="module")
def embedded() -> dict[str, descriptor_pb2.DescriptorProto]:
    library = Path(jaxlib.__file__).parent / "libjax_common.so"
    assert library.exists(), f"no {library}: look where this jaxlib keeps XLA's own descriptors"
    found: dict[str, descriptor_pb2.DescriptorProto] = {}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for name in FILES:
            descriptor = _descriptor(data, name)
            assert descriptor is not None, f"{library} has no descriptor of {name} any more"
            _messages(descriptor.message_type, found)
    return found


# Fields that jaxlib 0.10 does not know yet.
NEWER = {"has_dynamic_root", "is_composite"}
SAME_ON_THE_WIRE = {
    Field.TYPE_BYTES: {Field.TYPE_BYTES, Field.TYPE_MESSAGE, Field.TYPE_STRING},
    Field.TYPE_INT32: {Field.TYPE_INT32, Field.TYPE_ENUM, Field.TYPE_INT64},
    Field.TYPE_INT64: {Field.TYPE_INT64, Field.TYPE_INT32, Field.TYPE_ENUM},
}


@pytest.mark.parametrize("name", sorted(schema.TABLE))
def test_numbers_and_types(name, embedded):
    theirs = {field.name: field for field in embedded[name].field}
    for field in schema._MESSAGES[name].DESCRIPTOR.fields:
        if field.name in NEWER and field.name not in theirs:
            continue
        their = theirs[field.name]
        assert field.number == their.number, field.name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        assert their.type in SAME_ON_THE_WIRE.get(field.type, {field.type}), field.name
        assert field.is_repeated == (their.label == Field.LABEL_REPEATED), field.name


def test_what_is_not_listed_survives():
    text = """HloModule m
    ENTRY e {
      p = f32[4,8,8,3] parameter(0)
      k = f32[2,2,3,5] parameter(1)
      ROOT c = f32[4,7,7,5] convolution(p, k), window={size=2x2}, dim_labels=b01f_01io->b01f
    }"""
    serialized = parse_hlo_text(text)
    again = schema.HloModuleProto.FromString(serialized).SerializeToString()

    def printed(s):
        return _hlo.HloModule.from_serialized_hlo_module_proto(s).to_string()

    assert "window={size=2x2}" in printed(again)
    assert printed(again) == printed(serialized)
