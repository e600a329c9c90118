"""The command line: runs the parts within the time."""

import argparse
import os
import pathlib
import platform
import shlex
import shutil
import signal
import sys
import time

from on_gpu import devices, processes, sizes
from on_gpu.findings import Findings
from on_gpu.part import PARTS

OPTIONAL = ("torch", "flax", "jmp")
RESERVE = 8.0  # seconds for ending the last part
LEAST = 3.0  # seconds without which no part begins


def main(description: str | None) -> None:
  """Run the measurements of the command line."""
  args = _parse_args(description)
  until = time.time() + 60 * args.minutes
  signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended from outside."))
  out = args.out.resolve()
  scratch = out / "scratch"
  scratch.mkdir(parents=True, exist_ok=True)
  for name in ("results.json", "log.txt"):
    (out / name).unlink(missing_ok=True)
  findings = Findings(out)
  findings.add_facts(_describe_run(args))
  try:
    missing = _report_missing(args.without, findings)
    _run_parts(args, missing, until - RESERVE, scratch, out)
  finally:
    shutil.rmtree(scratch, ignore_errors=True)
  print(f"\nAll of this is in {args.out}.", flush=True)


def _parse_args(description):
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--out", type=pathlib.Path, required=True, help="folder of the results")
  add("--minutes", type=float, default=8, help="the time for all")
  add("--row-seconds", type=float, default=120, help="the limit of a row")
  size_help = "full: an H100; small: a GPU with 16 GB; tiny: to try it out"
  add("--size", choices=list(sizes.SIZES), default="full", help=size_help)
  add("--without", nargs="+", choices=OPTIONAL, default=[], metavar="LIBRARY")
  parts_help = f"some of {', '.join(PARTS)}"
  names = list(PARTS)
  add(
    "--parts",
    nargs="+",
    choices=names,
    default=names,
    metavar="PART",
    help=parts_help,
  )
  return parser.parse_args()


def _describe_run(args):
  return {
    "command": shlex.join(["python3", *sys.argv]),
    "date": time.strftime("%Y-%m-%d"),
    "python": platform.python_version(),
    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    "size": args.size,
    "minutes": args.minutes,
    "seconds for a row": args.row_seconds,
  }


def _report_missing(without, findings):
  """Return the libraries that are left out, and report each in a line."""
  missing = list(without)
  for library in OPTIONAL:
    if library in without:
      findings.add_line(f"Left out, as asked for: {library}")
    elif devices.find_version(library) is None:
      findings.add_line(f"Left out, since it is not installed: {library}")
      missing.append(library)
  return missing


def _run_parts(args, missing, until, scratch, out):
  parts = {
    name: part
    for name, part in PARTS.items()
    if name in args.parts and part.library not in missing
  }
  (out / "log.txt").touch()
  weights = [part.weight for part in parts.values()]
  for i, name in enumerate(parts):
    now = time.time()
    if now + LEAST > until:
      over = f"the {args.minutes:g} minutes are over"
      Findings(out).add_line(f"Left out, since {over}: {name}")
      continue
    share = (until - now) * weights[i] / sum(weights[i:])
    print(f"\n-- {name}, {share:.0f} s at most", flush=True)
    request = {
      "part": name,
      "size": args.size,
      "until": now + share,
      "without": missing,
      "out": str(out),
      "row_seconds": args.row_seconds,
    }
    processes.run(request, scratch)
