"""Runs the code on a page of Markdown, from top to bottom."""

import contextlib
import doctest
import re
import sys

# A ```python block runs, after the ones above it on its page, and so does a
# {code-cell}, which is a part of a page that is a notebook. A ```py block is
# for looking at: code of other systems, or a part of a function.
_RUNNABLE = re.compile(
  r"^```(?:python|\{code-cell\} python)\n(.*?)^```", re.MULTILINE | re.DOTALL
)


def find_code_blocks(path):
  """The code of each block that runs."""
  # Lines such as `:tags: [hide-input]` are options of a cell.
  return [
    re.sub(r"^:.*$", "", block, flags=re.MULTILINE)
    for block in _RUNNABLE.findall(path.read_text())
  ]


def run_page(path):
  """The names that the page defines; what it prints is printed.

  Each block may use what those above it define, and import a file next to the
  page. A block with prompts prints what the page says that it prints.
  """
  names = {"__name__": "__main__"}
  with _importing_from(path.parent):
    for block in find_code_blocks(path):
      if block.startswith(">>> "):
        _run_prompts(block, names, path)
      else:
        exec(compile(block, str(path), "exec"), names)
  return names


@contextlib.contextmanager
def _importing_from(folder):
  sys.path.insert(0, str(folder))
  try:
    yield
  finally:
    sys.path.remove(str(folder))


def _run_prompts(block, names, path):
  parser = doctest.DocTestParser()
  example = parser.get_doctest(block, names, path.name, str(path), 0)
  runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
  failed, attempted = runner.run(example, clear_globs=False)
  assert attempted and not failed, f"see the output of {path.name} above"
  names |= example.globs
