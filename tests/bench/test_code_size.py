"""benchmarks/lib/code_size.py: what it counts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib import code_size

CPP = """\
#include <vector>
// not { a function()
struct Point {
  Point(int x, int y) : x_(x), y_{y} {}
  int sum() const { return x_ + y_; }
  int x_, y_;
};

namespace {
template <int N>
static void fill(std::vector<std::pair<int, float>>& to, const float* from, int first,
                 int last) {
  for (int i = first; i < last; i++) {
    if (from[i] > 0) {
      to.push_back({i, from[i]});
    }
  }
  auto job = [&](int thread) { return thread; };
}
}  // namespace
"""
PYTHON = """\
class Sum:
    def __init__(self, a, *, b=1, **more):
        def inner(x):
            return x

        self.a = a
"""


def test_functions_of_both_languages(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(CPP)
    found = {(one.name, one.lines, one.arguments) for one in code_size.cpp_functions(tmp_path / "a.cpp")}
    assert found == {("Point", 1, 2), ("sum", 1, 0), ("fill", 9, 4)}
    (tmp_path / "a.py").write_text(PYTHON)
    found = {(one.name, one.lines, one.arguments) for one in code_size.python_functions(tmp_path / "a.py")}
    assert found == {("__init__", 5, 3), ("inner", 2, 1)}


def test_this_tree_is_counted() -> None:
    text = code_size.report([code_size.ROOT], ["import"])
    assert text.count("\n| functions | ") == 2 and "\n| csrc | " in text and "\n| `import` | " in text
