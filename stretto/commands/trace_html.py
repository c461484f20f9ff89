"""A trace as one HTML page that needs nothing else: a timeline to zoom and drag, and the ledger."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.runtime.recording.trace_events import Measured

from .trace_chrome import DEVICES, STREAMS, chrome

# More marks than this make a page that no browser likes; the longest are kept.
MOST_MARKS = 100_000


def page(ranks: Sequence[Measured], report: Mapping[str, Any]) -> str:
    """The page's text."""
    tracks, left = _tracks(ranks)
    notes = [*report["warnings"]]
    if left:
        notes.append(f"{left} of the shortest marks are not drawn; the JSON trace has them")
    data = json.dumps(tracks, separators=(",", ":")).replace("</", "<\\/")
    return (
        _PAGE.replace("@NOTES@", "".join(f"<p class=note>{html.escape(n)}</p>" for n in notes))
        .replace("@TOTALS@", html.escape(_totals(report)))
        .replace("@LEDGER@", _ledger(report["ledger"]))
        .replace("@DATA@", data)
    )


def _tracks(ranks: Sequence[Measured]) -> tuple[list[dict[str, Any]], int]:
    """``{"name", "marks": [[begin us, length us (-1: skipped), name, what]]}``, and how many were left."""
    marks: dict[tuple[int, int], list[list[Any]]] = {}
    names: dict[tuple[int, int], str] = {}
    for event in chrome(ranks)["traceEvents"]:
        key = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[key] = f"rank {key[0]} {event['args']['name']}"
            continue
        args = event["args"]
        what = " ".join(
            f"{k}={round(v, 1) if isinstance(v, float) else v}" for k, v in args.items() if v != ""
        )
        span = -1.0 if event["ph"] == "i" else round(event["dur"], 3)
        marks.setdefault(key, []).append([round(event["ts"], 3), span, event["name"], what])
    everything = sorted((abs(m[1]) for ms in marks.values() for m in ms), reverse=True)
    least = everything[MOST_MARKS] if len(everything) > MOST_MARKS else 0.0
    tracks, left = [], 0
    for key in sorted(names):
        kept = [m for m in marks.get(key, []) if abs(m[1]) >= least]
        left += len(marks.get(key, [])) - len(kept)
        kind = "stream" if key[1] >= STREAMS else "device" if key[1] >= DEVICES else "walk"
        tracks.append({"name": names[key], "kind": kind, "marks": kept})
    return tracks, left


def _totals(report: Mapping[str, Any]) -> str:
    return (
        f"wall {report['wall_ms']:.2f} ms · compute {report['compute_ms']:.2f} ms · communication "
        f"{report['communication_ms']:.2f} ms, of which exposed {report['exposed_ms']:.2f} ms and "
        f"overlapped {report['overlapped_ms']:.2f} ms (means of {len(report['ranks'])} ranks) · "
        f"{report['messages']} messages, {report['skipped']} skipped · {report['bytes']} bytes"
    )


def _ledger(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for e in sorted(entries, key=lambda e: -e["exposed_total"]):
        predicted = "" if e["predicted"] is None else f"{e['predicted'] * 1e6:.1f}"
        cells = [
            e["name"], e["op"], e["program"], e["source"], e["stream"], e["group_size"], e["bytes"],
            e["calls"], e["skipped"], f"{e['seconds'] * 1e6:.1f}", predicted,
            f"{e['exposed'] * 1e6:.1f}", f"{e['exposed_total'] * 1e3:.3f}",
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in cells) + "</tr>")
    return "".join(rows)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>stretto trace</title><style>
body{font:14px system-ui,sans-serif;margin:1em;color:#222;background:#fff}
canvas{width:100%;border:1px solid #ccc;cursor:grab;display:block}
table{border-collapse:collapse;margin-top:1em;font-size:13px}
td,th{padding:2px 8px;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
td:nth-child(-n+4),th:nth-child(-n+4){text-align:left}
#tip{position:fixed;background:#222;color:#fff;padding:4px 8px;font-size:12px;pointer-events:none;
display:none;max-width:60em}
.note{background:#fff3cd;padding:4px 8px}
</style></head><body>
<h1>stretto trace</h1>@NOTES@<p>@TOTALS@</p>
<p>Wheel: zoom. Drag: move. Double click: everything. Hollow marks were skipped.</p>
<canvas id="c"></canvas><div id="tip"></div>
<table><thead><tr><th>collective</th><th>kind</th><th>program</th><th>source</th><th>stream</th>
<th>group</th><th>bytes</th><th>calls</th><th>skipped</th><th>measured µs</th><th>predicted µs</th>
<th>exposed µs</th><th>exposed in all, ms</th></tr></thead><tbody>@LEDGER@</tbody></table>
<script>
const tracks=@DATA@;
const canvas=document.getElementById('c'),tip=document.getElementById('tip'),g=canvas.getContext('2d');
const ROW=20,LEFT=170,TOP=22,colors={stream:'#d9822b',device:'#3b7dd8',walk:'#7d8a99'};
let whole=1;
for(const t of tracks){t.marks.sort((a,b)=>a[0]-b[0]);for(const m of t.marks)whole=Math.max(whole,m[0]+Math.max(m[1],0));}
let from=0,to=whole,drag=null;
function width(){return canvas.clientWidth}
function x(us){return LEFT+(us-from)/(to-from)*(width()-LEFT)}
function draw(){
 const r=devicePixelRatio||1,w=width(),h=TOP+tracks.length*ROW;
 canvas.width=w*r;canvas.height=h*r;canvas.style.height=h+'px';g.setTransform(r,0,0,r,0,0);
 g.clearRect(0,0,w,h);g.font='11px system-ui,sans-serif';g.textBaseline='middle';
 const step=Math.pow(10,Math.floor(Math.log10((to-from)/4)));
 g.fillStyle='#666';g.strokeStyle='#eee';
 for(let us=Math.ceil(from/step)*step;us<to;us+=step){
  g.beginPath();g.moveTo(x(us),0);g.lineTo(x(us),h);g.stroke();
  if((us/step)%2<1)g.fillText(us>=1000?(us/1000).toFixed(step<100?2:1)+' ms':us.toFixed(step<1?1:0)+' µs',x(us)+2,8);}
 tracks.forEach((t,i)=>{
  const y=TOP+i*ROW;g.fillStyle='#222';g.fillText(t.name,2,y+ROW/2);
  g.save();g.beginPath();g.rect(LEFT,y,w-LEFT,ROW);g.clip();g.fillStyle=g.strokeStyle=colors[t.kind];
  let last=-1;
  for(const m of t.marks){
   const a=x(m[0]),b=x(m[0]+Math.max(m[1],0));if(b<LEFT||a>w)continue;
   if(m[1]<0){g.strokeRect(a+.5,y+4.5,7,ROW-9);continue}
   if(b<last+.3)continue;last=b;
   g.globalAlpha=.85;g.fillRect(a,y+2,Math.max(b-a,.6),ROW-4);g.globalAlpha=1;
   if(b-a>40){g.save();g.beginPath();g.rect(a,y,b-a-2,ROW);g.clip();g.fillStyle='#fff';g.fillText(m[2],a+3,y+ROW/2);g.restore();}
  }g.restore();});
}
function at(e){
 const b=canvas.getBoundingClientRect(),px=e.clientX-b.left,i=Math.floor((e.clientY-b.top-TOP)/ROW);
 if(i<0||i>=tracks.length||px<LEFT)return null;
 let found=null;
 for(const m of tracks[i].marks){const a=x(m[0])-1,z=m[1]<0?a+9:x(m[0]+m[1])+1;if(px>=a&&px<=z)found=m;}
 return found;
}
canvas.onwheel=e=>{e.preventDefault();const b=canvas.getBoundingClientRect();
 const us=from+(e.clientX-b.left-LEFT)/(width()-LEFT)*(to-from),k=Math.exp(e.deltaY*.002);
 from=Math.max(0,us-(us-from)*k);to=Math.min(whole,us+(to-us)*k);if(to-from<.1)to=from+.1;draw();};
canvas.onmousedown=e=>{drag={x:e.clientX,from,to}};
onmouseup=()=>{drag=null};
canvas.ondblclick=()=>{from=0;to=whole;draw()};
canvas.onmousemove=e=>{
 if(drag){const d=(drag.x-e.clientX)/(width()-LEFT)*(drag.to-drag.from);from=drag.from+d;to=drag.to+d;draw();return}
 const m=at(e);tip.style.display=m?'block':'none';
 if(m){tip.textContent=m[2]+': '+(m[1]<0?'skipped':m[1].toFixed(1)+' µs')+' at '+m[0].toFixed(1)+' µs '+m[3];
  tip.style.left=Math.min(e.clientX+12,innerWidth-300)+'px';tip.style.top=(e.clientY+12)+'px';}};
canvas.onmouseleave=()=>{tip.style.display='none'};
onresize=draw;draw();
</script></body></html>
"""  # noqa: E501
