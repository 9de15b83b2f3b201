// The Python face of planning with cuDNN. Every call that may wait on cuDNN releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cudnn_backend.h"
#include "ffi/cudnn_version.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cudnn_jax {
namespace {

using Knobs = std::map<std::string, int64_t>;

std::pair<int64_t, Knobs> plan_engine(BackendGraph& graph, int64_t index) {
  EngineChoice choice = graph.plan_engine(index);
  return {choice.engine_id, std::move(choice.knobs)};
}

using Layouts = std::map<int64_t, std::pair<std::vector<int64_t>, std::vector<int64_t>>>;

Layouts layouts(BackendGraph& graph) {
  Layouts told;
  for (auto& [uid, layout] : graph.layouts()) told[uid] = {std::move(layout.dim), std::move(layout.stride)};
  return told;
}

nb::bytes serialize_plan(BackendGraph& graph, int64_t index) {
  std::vector<uint8_t> bytes;
  {
    nb::gil_scoped_release release;
    bytes = to_bytes(graph.plan(index));
  }
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace

void bind_cudnn(nb::module_& m) {
  // A NotImplementedError: an engine may decline by it.
  nb::exception<BackendNotSupported>(m, "BackendNotSupported", PyExc_NotImplementedError);

  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def("cudnn_version", &cudnn_version, Release(),
        "91900 for cuDNN 9.19.0. Raises LibraryNotFound naming what was tried.");
  m.def("lowered_node_types", &lowered_node_types,
        "The types of nodes that have a lowering to cuDNN, rising. Asks no library.");
  nb::class_<BackendGraph>(m, "BackendGraph",
                           "A graph lowered to cuDNN, for a device or for the properties of one, and the "
                           "plans that cuDNN has for it.")
      .def(nb::init<const std::string&, std::optional<int>, const std::optional<std::string>&>(), "graph"_a,
           "device"_a.none(), "device_properties"_a.none(), Release(),
           "Takes a graph's canonical JSON and one of the ordinal of a device and cuDNN's JSON of a device's "
           "properties. Raises BackendNotSupported with cuDNN's reason.")
      .def("create_execution_plans", &BackendGraph::create_execution_plans, "mode"_a, Release(),
           "Appends the plans of one of cuDNN's heuristics, \"A\", \"B\" or \"FALLBACK\"; returns how many. "
           "Raises BackendNotSupported when it has none.")
      .def(
          "create_execution_plan",
          [](BackendGraph& graph, int64_t engine_id, Knobs knobs) {
            return graph.create_execution_plan({engine_id, std::move(knobs)});
          },
          "engine_id"_a, "knobs"_a, Release(),
          "Appends one plan, as plan_engine tells it; returns its index.")
      .def("plan_count", &BackendGraph::plan_count, Release())
      .def("plan_name", &BackendGraph::plan_name, "index"_a, Release(), "cuDNN's tag of the plan.")
      .def("plan_engine", &plan_engine, "index"_a, Release(), "The plan's engine id and knobs by name.")
      .def(
          "plan_notes",
          [](BackendGraph& graph, int64_t index) {
            PlanNotes notes = graph.plan_notes(index);
            return std::pair(std::move(notes.numeric), std::move(notes.behavior));
          },
          "index"_a, Release(), "The names of the plan's numerical and behavior notes.")
      .def("build_plan", &BackendGraph::build_plan, "index"_a, Release(),
           "Raises BackendNotSupported when the plan does not build.")
      .def("plan_workspace", &BackendGraph::plan_workspace, "index"_a, Release(),
           "Bytes, of a plan that is built.")
      .def("serialize_plan", &serialize_plan, "index"_a,
           "What a \"cudnn\" step holds, of a plan that is built. The same plan gives the same bytes.")
      .def("uids", &BackendGraph::uids, Release(), "The uids whose buffers the caller gives, rising.")
      .def(
          "layouts", &layouts, Release(),
          "(dim, stride) of each tensor by uid, as the lowering said it or as cuDNN's frontend inferred it.");
}

}  // namespace cudnn_jax
