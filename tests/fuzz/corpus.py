"""The modules that are mutated: written by hand, and made by XLA from JAX programs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Every form in which order, tokens, groups and valid iterations are spelled.
HANDMADE = (
    """HloModule forms, num_partitions=4

sum {
  left = f32[] parameter(0)
  right = f32[] parameter(1)
  ROOT both = f32[] add(left, right)
}

body {
  c = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[8] get-tuple-element(c), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  moved = f32[8] collective-permute(x), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}},
    frontend_attributes={_xla_send_recv_validation="{{0,1},{1,2},{1,0}}"}
  next = f32[8] add(x, moved)
  ROOT n = (s32[], f32[8]) tuple(j, next)
}

condition {
  cc = (s32[], f32[8]) parameter(0)
  ci = s32[] get-tuple-element(cc), index=0
  three = s32[] constant(3)
  ROOT less = pred[] compare(ci, three), direction=LT
}

ENTRY e {
  p = f32[8] parameter(0)
  q = f32[4,2] parameter(1)
  total = f32[8] all-reduce(p), to_apply=sum, channel_id=1, replica_groups={{0,1,2,3}},
    use_global_device_ids=true, metadata={source_file="step.py" source_line=12}
  gathered = f32[16,2] all-gather(q), dimensions={0}, channel_id=1, replica_groups=[1,4]<=[4],
    use_global_device_ids=true, control-predecessors={total}
  zero = s32[] constant(0)
  init = (s32[], f32[8]) tuple(zero, p)
  loop = (s32[], f32[8]) while(init), condition=condition, body=body,
    backend_config={"known_trip_count":{"n":"3"}}
  shifted = f32[8] get-tuple-element(loop), index=1
  ROOT out = (f32[8], f32[16,2], f32[8]) tuple(total, gathered, shifted)
}
""",
    """HloModule transfers, num_partitions=2, replica_count=1

ENTRY e {
  p = f32[4]{0} parameter(0)
  t = token[] after-all()
  r = (f32[4]{0}, u32[], token[]) recv(t), channel_id=3,
    frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}
  s = (f32[4]{0}, u32[], token[]) send(p, t), channel_id=3, control-predecessors={r},
    frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}
  rd = (f32[4]{0}, token[]) recv-done(r), channel_id=3,
    frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}
  sd = token[] send-done(s), channel_id=3, frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}
  got = f32[4]{0} get-tuple-element(rd), index=0
  after = token[] get-tuple-element(rd), index=1
  both = token[] after-all(after, sd)
  ROOT sum = f32[4]{0} add(got, p)
}
""",
    """HloModule asynchronous, replica_count=4

add {
  x = bf16[] parameter(0)
  y = bf16[] parameter(1)
  ROOT z = bf16[] add(x, y)
}

big {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] maximum(x, y)
}

ENTRY e {
  p = bf16[4,6]{1,0} parameter(0)
  q = f32[8]{0} parameter(1)
  ars = bf16[4,6]{1,0} all-reduce-start(p), to_apply=add, replica_groups={{0,1},{2,3}}
  ags = (f32[8]{0}, f32[32]{0}) all-gather-start(q), dimensions={0}, replica_groups={}
  cps = (f32[8]{0}, f32[8]{0}) collective-permute-start(q), source_target_pairs={{0,3},{3,0}}
  twice = f32[8]{0} add(q, q)
  ard = bf16[4,6]{1,0} all-reduce-done(ars)
  agd = f32[32]{0} all-gather-done(ags)
  cpd = f32[8]{0} collective-permute-done(cps)
  rs = f32[2]{0} reduce-scatter(twice), dimensions={0}, to_apply=big, replica_groups={{0,1,2,3}}
  aa = f32[8]{0} all-to-all(cpd), dimensions={0}, replica_groups={{0,2},{1,3}}
  ROOT out = (bf16[4,6]{1,0}, f32[32]{0}, f32[2]{0}, f32[8]{0}) tuple(ard, agd, rs, aa)
}
""",
    """HloModule branches, num_partitions=2

yes {
  a = f32[2] parameter(0)
  ROOT r = f32[2] collective-permute(a), channel_id=1, source_target_pairs={{0,1},{1,0}}
}

no {
  b = f32[2] parameter(0)
  ROOT m = f32[2] negate(b)
}

sum {
  left = f32[] parameter(0)
  right = f32[] parameter(1)
  ROOT both = f32[] add(left, right)
}

ENTRY e {
  p = f32[2] parameter(0)
  k = s32[] parameter(1)
  tok = f32[] constant(0)
  first = (f32[2], f32[]) all-reduce(p, tok), to_apply=sum, channel_id=2, replica_groups={{0,1}},
    use_global_device_ids=true
  value = f32[2] get-tuple-element(first), index=0
  chain = f32[] get-tuple-element(first), index=1
  second = (f32[2], f32[]) all-reduce(value, chain), to_apply=sum, channel_id=2, replica_groups={{0,1}},
    use_global_device_ids=true
  v2 = f32[2] get-tuple-element(second), index=0
  chosen = f32[2] conditional(k, v2, v2), branch_computations={yes, no}
  id = u32[] partition-id()
  held = (f32[2], u32[]) opt-barrier((f32[2], u32[]) tuple(chosen, id))
  ROOT out = f32[2] get-tuple-element(held), index=0
}
""",
)


@dataclass(frozen=True)
class Seed:
    """A module in both forms."""

    name: str
    text: str
    proto: bytes


def seeds() -> tuple[Seed, ...]:
    """All modules, always in the same order.

    They are made in a process of their own: the caller forks, and JAX's client has threads.
    """
    environment = dict(os.environ)
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    folder = Path(__file__).resolve().parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    made = subprocess.run(
        [sys.executable, "-m", "fuzz.jax_modules"],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    found: tuple[Seed, ...] = pickle.loads(made)
    return found
