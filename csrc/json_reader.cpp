// Reads the texts of JSON lines, because Python's json module is too slow for the many lines of a corpus.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json_texts.h"

namespace py = pybind11;

namespace {

py::list json_texts(const py::list& lines, const std::vector<std::string>& keys) {
  JsonTexts reader(keys);
  py::list rows(lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const py::object line = lines[i];
    if (!py::isinstance<py::bytes>(line)) throw py::type_error("a line is bytes");
    if (!reader.read(std::string_view(py::reinterpret_borrow<py::bytes>(line)))) {
      rows[i] = py::none();
      continue;
    }
    py::list row(keys.size());
    for (std::size_t k = 0; k < keys.size(); ++k) row[k] = py::bytes(reader.texts()[k]);
    rows[i] = std::move(row);
  }
  return rows;
}

}  // namespace

PYBIND11_MODULE(_json_reader, module) {
  module.doc() = "The texts of JSON lines, in C++.";
  module.def("json_texts", &json_texts, py::arg("lines"), py::arg("keys"),
             "For each line that is plainly a JSON object with texts under these keys, the texts in UTF-8; else None.");
}
