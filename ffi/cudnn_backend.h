// Planning with cuDNN: a canonical graph in, ranked and built plans out. The one door to cudnn_frontend,
// whose headers no file but cudnn_frontend_unit.cc sees.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/cudnn_plan.h"
#include "ffi/error.h"

namespace cudnn_jax {

// cuDNN, or the lowering to it, does not serve this graph.
class BackendNotSupported : public Error {
 public:
  explicit BackendNotSupported(const std::string& message) : Error(ErrorKind::kUnimplemented, message) {}
};

struct EngineChoice {
  int64_t engine_id = -1;
  std::map<std::string, int64_t> knobs;
};

// What cuDNN says of a plan's engine, by the names of its notes.
struct PlanNotes {
  std::vector<std::string> numeric;
  std::vector<std::string> behavior;
};

// Where a tensor's elements lie: elements between neighbours along each axis of `dim`.
struct TensorLayout {
  std::vector<int64_t> dim;
  std::vector<int64_t> stride;
};

// The types of nodes that have a lowering to cuDNN, rising. Asks no library.
std::vector<std::string> lowered_node_types();

// Thread safe; calls on one graph wait for one another.
class BackendGraph {
 public:
  // Lowers and validates `graph` (canonical JSON), for a device that is here, or for one that is described by
  // cuDNN's JSON of its properties. Throws BackendNotSupported, LibraryNotFound, or Error for a graph that is
  // no graph.
  BackendGraph(const std::string& graph, std::optional<int> device,
               const std::optional<std::string>& device_properties);
  ~BackendGraph();
  BackendGraph(const BackendGraph&) = delete;
  BackendGraph& operator=(const BackendGraph&) = delete;

  // Appends the plans of one of cuDNN's heuristics, "A", "B" or "FALLBACK"; how many.
  int64_t create_execution_plans(const std::string& mode);
  // Appends one plan; its index.
  int64_t create_execution_plan(const EngineChoice& choice);

  int64_t plan_count();
  std::string plan_name(int64_t index);
  EngineChoice plan_engine(int64_t index);
  PlanNotes plan_notes(int64_t index);
  void build_plan(int64_t index);
  // Of a built plan.
  int64_t plan_workspace(int64_t index);
  CudnnPlan plan(int64_t index);

  // The uids that the caller fills, rising.
  std::vector<int64_t> uids();
  // By uid, as the lowering said it or as cuDNN's frontend inferred it.
  std::map<int64_t, TensorLayout> layouts();

 private:
  struct Lowered;
  std::unique_ptr<Lowered> lowered_;
};

}  // namespace cudnn_jax
