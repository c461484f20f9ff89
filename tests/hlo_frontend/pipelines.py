"""Pipelines as HLO, a numpy evaluator of such HLO, and ways to break them.

`circular` writes the loop; `Evaluator` runs a module on all devices straight from its instructions, by the
definitions of the few ops that occur, and shares nothing with the package but the reading of protos. What is
received where a transfer is left out is whatever the caller asks for: zeros, or NaN.
"""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np

from stretto.hlo_frontend.collectives import CollectiveReader
from stretto.hlo_frontend.flatten import flatten
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.passes.valid import ValidPolicy, apply
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.values import all_nodes

WIDTH = 2
PROVED = ValidPolicy()


def circular(stages: int, microbatches: int, repeats: int = 1, attribute: str = "") -> str:
    """Every microbatch goes ``repeats`` times round a ring of ``stages``.

    Stage s works on slot ``i - s`` in iteration i; slot j belongs to microbatch ``j % k`` in its pass
    ``j // k`` with ``k = max(microbatches, stages)``. What comes back to stage 0 waits in a buffer. Output:
    f32[microbatches, WIDTH], filled on the last device.
    """
    p, m, r, w = stages, microbatches, repeats, WIDTH
    k = max(m, p)
    trips = k * (r - 1) + m + p - 1
    ring = ",".join(f"{{{s},{(s + 1) % p}}}" for s in range(p))
    extra = f", frontend_attributes={{_xla_send_recv_validation={attribute}}}" if attribute else ""
    carry = f"(s32[], f32[{w}], f32[{k},{w}], f32[{m},{w}], f32[{m},{w}], f32[{w}])"
    back = (k - p % k) % k
    return f"""HloModule circular, num_partitions={p}
body {{
  c = {carry} parameter(0)
  i = s32[] get-tuple-element(c), index=0
  received = f32[{w}] get-tuple-element(c), index=1
  buffer = f32[{k},{w}] get-tuple-element(c), index=2
  outputs = f32[{m},{w}] get-tuple-element(c), index=3
  inputs = f32[{m},{w}] get-tuple-element(c), index=4
  weight = f32[{w}] get-tuple-element(c), index=5
  uid = u32[] partition-id()
  id = s32[] convert(uid)
  zero = s32[] constant(0)
  one = s32[] constant(1)
  stages = s32[] constant({p})
  slots = s32[] constant({k})
  back = s32[] constant({back})
  last_input = s32[] constant({m - 1})
  last_stage = s32[] constant({p - 1})
  first_out = s32[] constant({k * (r - 1)})
  microbatches = s32[] constant({m})
  slot = s32[] subtract(i, id)
  is_first = pred[] compare(id, zero), direction=EQ
  is_last = pred[] compare(id, last_stage), direction=EQ
  shifted = s32[] add(i, back)
  place = s32[] remainder(shifted, slots)
  row = f32[1,{w}] reshape(received)
  stored = f32[{k},{w}] dynamic-update-slice(buffer, row, place, zero)
  came = pred[] compare(i, stages), direction=GE
  stores = pred[] and(is_first, came)
  new_buffer = f32[{k},{w}] select(stores, stored, buffer)
  turn = s32[] remainder(i, slots)
  which = s32[] minimum(turn, last_input)
  fresh = f32[1,{w}] dynamic-slice(inputs, which, zero), dynamic_slice_sizes={{1,{w}}}
  again = f32[1,{w}] dynamic-slice(new_buffer, turn, zero), dynamic_slice_sizes={{1,{w}}}
  begins = pred[] compare(slot, slots), direction=LT
  entering = f32[1,{w}] select(begins, fresh, again)
  entering_row = f32[{w}] reshape(entering)
  x = f32[{w}] select(is_first, entering_row, received)
  product = f32[{w}] multiply(x, weight)
  y = f32[{w}] add(product, weight)
  out = s32[] subtract(slot, first_out)
  started = pred[] compare(out, zero), direction=GE
  unfinished = pred[] compare(out, microbatches), direction=LT
  in_range = pred[] and(started, unfinished)
  writes = pred[] and(in_range, is_last)
  result = f32[1,{w}] reshape(y)
  written = f32[{m},{w}] dynamic-update-slice(outputs, result, out, zero)
  new_outputs = f32[{m},{w}] select(writes, written, outputs)
  sent = f32[{w}] collective-permute(y), channel_id=1, source_target_pairs={{{ring}}}{extra}
  next = s32[] add(i, one)
  ROOT t = {carry} tuple(next, sent, new_buffer, new_outputs, inputs, weight)
}}
condition {{
  cc = {carry} parameter(0)
  ci = s32[] get-tuple-element(cc), index=0
  trips = s32[] constant({trips})
  ROOT less = pred[] compare(ci, trips), direction=LT
}}
ENTRY e {{
  xs = f32[{m},{w}] parameter(0)
  ws = f32[{w}] parameter(1)
  start = s32[] constant(0)
  nothing = f32[] constant(0)
  state = f32[{w}] broadcast(nothing), dimensions={{}}
  empty = f32[{k},{w}] broadcast(nothing), dimensions={{}}
  blank = f32[{m},{w}] broadcast(nothing), dimensions={{}}
  init = {carry} tuple(start, state, empty, blank, xs, ws)
  loop = {carry} while(init), condition=condition, body=body
  ROOT o = f32[{m},{w}] get-tuple-element(loop), index=3
}}
"""


def hops(stages: int, microbatches: int, repeats: int) -> int:
    """Messages that `circular` needs: each microbatch leaves every stage but its very last."""
    return microbatches * (stages * repeats - 1)


def expected(inputs: np.ndarray, weights: np.ndarray, repeats: int) -> np.ndarray:
    """Output of `circular` for ``inputs[m]`` and ``weights[stage]``, stage after stage."""
    for _ in range(repeats):
        for weight in weights:
            inputs = inputs * weight + weight
    return inputs


def valid_iterations(text: str, devices: int, policy: ValidPolicy = PROVED) -> dict:
    """By name of each permute: its pairs and their valid iterations, and the report."""
    entry = flatten(Module.parse(parse_hlo_text(text)).entry, CollectiveReader(1, devices))
    report = apply(entry, 1, devices, policy)
    return {
        n.instruction.name: (n.collective.pairs, n.collective.valid_iterations)
        for n in all_nodes(entry)
        if n.collective is not None and n.collective.pairs
    } | {"": report}


def is_valid(bounds: tuple[int, ...], iteration: int) -> bool:
    return any(lo <= iteration <= hi for lo, hi in zip(bounds[::2], bounds[1::2], strict=True))


class Evaluator:
    """Runs a module on all devices. ``valid``: as `valid_iterations` gives it; ``filling`` is received
    where it leaves a transfer out. ``messages`` counts transfers between two devices.
    """

    def __init__(self, text: str, devices: int, valid: dict | None = None, filling: float = 0.0):
        self.module = Module.parse(parse_hlo_text(text))
        self.devices = devices
        self.valid = valid or {}
        self.filling = filling
        self.iteration = 0
        self.messages: Counter[tuple[int, int]] = Counter()

    def run(self, *arguments: np.ndarray) -> np.ndarray:
        """``arguments[p][device]``; gives the result of every device."""
        with np.errstate(all="ignore"):
            return self._computation(self.module.entry, list(arguments))

    def _computation(self, computation, arguments):
        env: dict = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                env[instruction] = arguments[instruction.proto.parameter_number]
            else:
                operands = [env[o] for o in instruction.operands]
                rule = getattr(self, "_" + instruction.opcode.replace("-", "_"))
                env[instruction] = rule(instruction, *operands)
        return env[computation.root]

    def _all(self, value) -> np.ndarray:
        value = np.asarray(value)
        return np.broadcast_to(value, (self.devices, *value.shape))

    def _constant(self, i):
        text = re.search(rf"{re.escape(i.name)} = \S+ constant\((-?[\d.]+)\)", self._text())
        return self._all(np.int32(text[1]) if i.shape.element_type == 4 else np.float32(text[1]))

    def _text(self) -> str:
        if not hasattr(self, "_printed"):
            from jaxlib import _hlo

            serialized = self.module.proto.SerializeToString()
            module = _hlo.HloModule.from_serialized_hlo_module_proto(serialized)
            self._printed = module.to_string().replace("%", "")
        return self._printed

    def _partition_id(self, i):
        return np.arange(self.devices, dtype=np.uint32)

    def _convert(self, i, x):
        return x.astype(np.int32)

    def _copy(self, i, x):
        return x

    def _tuple(self, i, *parts):
        return parts

    def _get_tuple_element(self, i, x):
        return x[i.proto.tuple_index]

    def _broadcast(self, i, x):
        shape = tuple(i.shape.dimensions)
        return np.broadcast_to(x.reshape(self.devices, *[1] * len(shape)), (self.devices, *shape))

    def _reshape(self, i, x):
        return x.reshape(self.devices, *i.shape.dimensions)

    def _add(self, i, x, y):
        return x + y

    def _subtract(self, i, x, y):
        return x - y

    def _multiply(self, i, x, y):
        return x * y

    def _minimum(self, i, x, y):
        return np.minimum(x, y)

    def _maximum(self, i, x, y):
        return np.maximum(x, y)

    def _remainder(self, i, x, y):
        return np.fmod(x, y)

    def _and(self, i, x, y):
        return x & y

    def _or(self, i, x, y):
        return x | y

    def _compare(self, i, x, y):
        names = {"EQ": "equal", "NE": "not_equal", "LT": "less", "LE": "less_equal",
                 "GT": "greater", "GE": "greater_equal"}  # fmt: skip
        return getattr(np, names[i.proto.comparison_direction])(x, y)

    def _select(self, i, pred, x, y):
        return np.where(pred.reshape(pred.shape + (1,) * (x.ndim - pred.ndim)), x, y)

    def _at(self, x, start, size):
        return np.clip(start, 0, x.shape[1] - size)

    def _dynamic_slice(self, i, x, start, _):
        size = i.shape.dimensions[0]
        at = self._at(x, start, size)
        return np.stack([x[d, at[d] : at[d] + size] for d in range(self.devices)])

    def _dynamic_update_slice(self, i, x, update, start, _):
        result = x.copy()
        at = self._at(x, start, update.shape[1])
        for d in range(self.devices):
            result[d, at[d] : at[d] + update.shape[1]] = update[d]
        return result

    def _collective_permute(self, i, x):
        result = np.zeros_like(x)
        _, valid = self.valid.get(i.name, ((), ()))
        for k, pair in enumerate(i.proto.source_target_pairs):
            if valid and not is_valid(valid[k], self.iteration):
                result[pair.target] = self.filling
                continue
            result[pair.target] = x[pair.source]
            self.messages[pair.source, pair.target] += pair.source != pair.target
        return result

    def _while(self, i, carry):
        body, condition = i.called
        outer, self.iteration = self.iteration, 0
        while self._computation(condition, [carry]).all():
            carry = self._computation(body, [carry])
            self.iteration += 1
        self.iteration = outer
        return carry


def mutated(text: str, rng: random.Random) -> tuple[str, str]:
    """The text with one change that keeps its types, and what was changed."""
    head, _, tail = text.partition("condition {")
    lines = head.split("\n")
    while True:
        at = rng.randrange(len(lines))
        if re.match(r"\s*(one|next) =", lines[at]):
            continue  # the loop must end
        changed = rng.choice(_CHANGES)(lines, at, rng)
        if changed is not None and changed != lines[at]:
            what = f"{lines[at].strip()}  =>  {changed.strip()}"
            lines[at] = changed
            return "\n".join(lines) + "condition {" + tail, what


def _drop_select(lines, at, rng):
    found = re.search(r"^(\s*\S+ = \S+) select\((\w+), (\w+), (\w+)\)", lines[at])
    if found is None or not found[1].split(" = ")[1].startswith("f32"):
        return None
    return f"{found[1]} copy({rng.choice([found[3], found[4]])})"


def _swap_select(lines, at, rng):
    return re.sub(r"select\((\w+), (\w+), (\w+)\)", r"select(\1, \3, \2)", lines[at])


def _off_by_one(lines, at, rng):
    def shifted(found):
        return f"s32[] constant({max(0, int(found[1]) + rng.choice([-2, -1, 1, 2]))})"

    if "slots =" in lines[at]:
        return None  # a divisor: zero would end the evaluation, not the proof
    return re.sub(r"s32\[\] constant\((\d+)\)", shifted, lines[at])


def _other_comparison(lines, at, rng):
    other = rng.choice(["EQ", "NE", "LT", "LE", "GT", "GE"])
    return re.sub(r"direction=\w+", f"direction={other}", lines[at])


def _other_scalar(lines, at, rng):
    """An operand of an op on s32[] becomes another s32[] defined before."""
    if " constant(" in lines[at] or "parameter(" in lines[at]:
        return None
    names = [re.match(r"\s*(\w+) = s32\[\]", line) for line in lines[:at]]
    scalars = [n[1] for n in names if n]
    used = [n for n in scalars if re.search(rf"[(, ]{n}[,)]", lines[at].split("=", 1)[-1])]
    if len(scalars) < 2 or not used or "get-tuple-element" in lines[at] or "tuple(" in lines[at]:
        return None
    left, right = lines[at].split("=", 1)
    target = rng.choice(used)
    if "remainder" in right and target == "slots":
        return None
    return left + "=" + re.sub(rf"\b{target}\b", rng.choice(scalars), right, count=1)


def _other_logic(lines, at, rng):
    if " and(" in lines[at]:
        return lines[at].replace(" and(", " or(")
    return None


def _read_early(lines, at, rng):
    """What was received, or what goes into the stage, is given out in place of the stage's result."""
    return lines[at].replace("reshape(y)", f"reshape({rng.choice(['received', 'x', 'product'])})")


def _other_index(lines, at, rng):
    return re.sub(r"(dynamic-\S+\(\w+, (?:\w+, )?)(place|turn|which|out), zero\)",
                  lambda f: f"{f[1]}{rng.choice(['zero', 'one', 'i'])}, zero)", lines[at])  # fmt: skip


_CHANGES = [
    _drop_select, _swap_select, _off_by_one, _other_comparison, _other_scalar, _other_logic,
    _read_early, _other_index,
]  # fmt: skip
