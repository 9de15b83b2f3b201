// The one translation unit that sees cudnn_frontend: it costs more to compile than all the others together.
// cudnn_frontend's JSON is left out of it (half of that cost); cudnn_plan.h has a form of its own.
#include <algorithm>
#include <cctype>
#include <mutex>
#include <set>
#include <sstream>

#include "ffi/cudnn_handles.h"
#include "ffi/cudnn_library.h"
#include "ffi/cudnn_lower_table.h"
#include "ffi/cudnn_plan_text.h"
#include "ffi/driver.h"
#include "ffi/json.h"

namespace cudnn_frontend {
// cudnn_frontend looks each symbol up once and keeps the answer, also when this is still null: nothing of it
// may be called before open_frontend().
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend

namespace cudnn_jax {
namespace {

namespace fe = cudnn_frontend;

void open_frontend() {
  static const bool opened = [] {
    open_planning_libraries();
    fe::cudnn_dlhandle = cudnn().library;
    return true;
  }();
  (void)opened;
}

// cuDNN tells its reasons as a stack for each engine that it tried, the best engine first and in it the
// innermost call first: "Warning: STATUS; Reason: condition". The frontend's own messages are one line.
std::string decisive_line(const std::string& message) {
  std::istringstream lines(message);
  std::string line;
  std::string first;
  while (std::getline(lines, line)) {
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
    const std::string mark = "Reason: ";
    const size_t reason = line.find(mark);
    if (reason != std::string::npos) {
      const size_t status = line.find("CUDNN_STATUS");
      const size_t end = line.find(';');
      const std::string named =
          status < end && end < reason ? " (" + line.substr(status, end - status) + ")" : "";
      return line.substr(reason + mark.size()) + named;
    }
    if (first.empty()) first = line;
  }
  const std::string prefix = "[cudnn_frontend] Error: ";
  if (first.compare(0, prefix.size(), prefix) == 0) first.erase(0, prefix.size());
  // Two texts of cuDNN's, joined without a space.
  const size_t joined = first.find("Descriptor FailedEncountered");
  if (joined != std::string::npos) first.erase(0, joined + std::string("Descriptor Failed").size());
  return first.empty() ? "cuDNN gave no reason" : first;
}

void check(fe::error_t status) {
  if (status.is_bad()) throw BackendNotSupported(decisive_line(status.get_message()));
}

// cudnn_frontend throws too. Everything that calls it goes through here.
template <typename Body>
auto guarded(Body&& body) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw BackendNotSupported(decisive_line(error.what()));
  }
}

constexpr const char* kUnnamedKnob = "KNOB_";

// cuDNN's knob numbers by their names, as far as cudnn_frontend has names for them.
const std::map<std::string, int>& knob_numbers() {
  static const std::map<std::string, int> kNumbers = {
      {"SWIZZLE", CUDNN_KNOB_TYPE_SWIZZLE},
      {"TILE_SIZE", CUDNN_KNOB_TYPE_TILE_SIZE},
      {"EDGE", CUDNN_KNOB_TYPE_EDGE},
      {"MULTIPLY", CUDNN_KNOB_TYPE_MULTIPLY},
      {"SPLIT_K_BUF", CUDNN_KNOB_TYPE_SPLIT_K_BUF},
      {"TILEK", CUDNN_KNOB_TYPE_TILEK},
      {"STAGES", CUDNN_KNOB_TYPE_STAGES},
      {"REDUCTION_MODE", CUDNN_KNOB_TYPE_REDUCTION_MODE},
      {"SPLIT_K_SLC", CUDNN_KNOB_TYPE_SPLIT_K_SLC},
      {"IDX_MODE", CUDNN_KNOB_TYPE_IDX_MODE},
      {"SPECFILT", CUDNN_KNOB_TYPE_SPECFILT},
      {"KERNEL_CFG", CUDNN_KNOB_TYPE_KERNEL_CFG},
      {"WORKSPACE", CUDNN_KNOB_TYPE_WORKSPACE},
      {"TILE_CGA", CUDNN_KNOB_TYPE_TILE_CGA},
      {"TILE_CGA_M", CUDNN_KNOB_TYPE_TILE_CGA_M},
      {"TILE_CGA_N", CUDNN_KNOB_TYPE_TILE_CGA_N},
      {"BLOCK_SIZE", CUDNN_KNOB_TYPE_BLOCK_SIZE},
      {"OCCUPANCY", CUDNN_KNOB_TYPE_OCCUPANCY},
      {"ARRAY_SIZE_PER_THREAD", CUDNN_KNOB_TYPE_ARRAY_SIZE_PER_THREAD},
      {"SPLIT_COLS", CUDNN_KNOB_TYPE_SPLIT_COLS},
      {"TILE_ROWS", CUDNN_KNOB_TYPE_TILE_ROWS},
      {"TILE_COLS", CUDNN_KNOB_TYPE_TILE_COLS},
      {"LOAD_SIZE", CUDNN_KNOB_TYPE_LOAD_SIZE},
      {"CTA_COUNT", CUDNN_KNOB_TYPE_CTA_COUNT},
      {"STREAM_K", CUDNN_KNOB_TYPE_STREAM_K},
      {"SPLIT_P_SLC", CUDNN_KNOB_TYPE_SPLIT_P_SLC},
      {"TILE_M", CUDNN_KNOB_TYPE_TILE_M},
      {"TILE_N", CUDNN_KNOB_TYPE_TILE_N},
      {"WARP_SPEC_CFG", CUDNN_KNOB_TYPE_WARP_SPEC_CFG},
  };
  return kNumbers;
}

std::string knob_name(int number) {
  for (const auto& [name, known] : knob_numbers()) {
    if (known == number) return name;
  }
  return kUnnamedKnob + std::to_string(number);
}

cudnnBackendKnobType_t knob_number(const std::string& name) {
  const auto known = knob_numbers().find(name);
  if (known != knob_numbers().end()) return static_cast<cudnnBackendKnobType_t>(known->second);
  const std::string prefix = kUnnamedKnob;
  const std::string digits = name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : "";
  if (digits.empty() || digits.size() > 6 || !std::all_of(digits.begin(), digits.end(), ::isdigit)) {
    throw BackendNotSupported("knob " + name + ": cuDNN has none of that name");
  }
  return static_cast<cudnnBackendKnobType_t>(std::stoi(digits));
}

template <typename Note>
std::vector<std::string> names_of(const std::vector<Note>& notes, const std::map<Note, const char*>& names) {
  std::vector<std::string> found;
  for (const Note note : notes) {
    const auto named = names.find(note);
    if (named != names.end()) found.emplace_back(named->second);
  }
  return found;
}

const std::map<fe::NumericalNote_t, const char*> kNumericalNotes = {
    {fe::NumericalNote_t::TENSOR_CORE, "TENSOR_CORE"},
    {fe::NumericalNote_t::DOWN_CONVERT_INPUTS, "DOWN_CONVERT_INPUTS"},
    {fe::NumericalNote_t::REDUCED_PRECISION_REDUCTION, "REDUCED_PRECISION_REDUCTION"},
    {fe::NumericalNote_t::FFT, "FFT"},
    {fe::NumericalNote_t::NONDETERMINISTIC, "NONDETERMINISTIC"},
    {fe::NumericalNote_t::WINOGRAD, "WINOGRAD"},
    {fe::NumericalNote_t::WINOGRAD_TILE_4x4, "WINOGRAD_TILE_4x4"},
    {fe::NumericalNote_t::WINOGRAD_TILE_6x6, "WINOGRAD_TILE_6x6"},
    {fe::NumericalNote_t::WINOGRAD_TILE_13x13, "WINOGRAD_TILE_13x13"},
    {fe::NumericalNote_t::STRICT_NAN_PROP, "STRICT_NAN_PROP"},
};

const std::map<fe::BehaviorNote_t, const char*> kBehaviorNotes = {
    {fe::BehaviorNote_t::RUNTIME_COMPILATION, "RUNTIME_COMPILATION"},
    {fe::BehaviorNote_t::REQUIRES_FILTER_INT8x32_REORDER, "REQUIRES_FILTER_INT8x32_REORDER"},
    {fe::BehaviorNote_t::REQUIRES_BIAS_INT8x32_REORDER, "REQUIRES_BIAS_INT8x32_REORDER"},
    {fe::BehaviorNote_t::SUPPORTS_CUDA_GRAPH_NATIVE_API, "SUPPORTS_CUDA_GRAPH_NATIVE_API"},
    {fe::BehaviorNote_t::CUBLASLT_DEPENDENCY, "CUBLASLT_DEPENDENCY"},
};

// An engine's tag is "eng10_k2=24_k18=1": its number, and the numbers and values of its knobs.
EngineChoice read_tag(const std::string& tag) {
  EngineChoice choice;
  std::istringstream parts(tag);
  std::string part;
  while (std::getline(parts, part, '_')) {
    const size_t equals = part.find('=');
    if (part.compare(0, 3, "eng") == 0) {
      choice.engine_id = std::stoll(part.substr(3));
    } else if (!part.empty() && part[0] == 'k' && equals != std::string::npos) {
      choice.knobs[knob_name(std::stoi(part.substr(1, equals - 1)))] = std::stoll(part.substr(equals + 1));
    }
  }
  if (choice.engine_id < 0) throw Error(ErrorKind::kInternal, "cuDNN's engine tag " + tag + " has no engine");
  return choice;
}

template <typename Value>
std::vector<uint8_t> bytes_of(const Value* values, size_t count) {
  const auto* begin = reinterpret_cast<const uint8_t*>(values);
  return {begin, begin + count * sizeof(Value)};
}

// What an execution needs is protected in cudnn_frontend's classes.
class PlanGraph final : public fe::graph::Graph {
 public:
  const std::unordered_set<int64_t>& backend_uids() const { return variant_pack_uids; }

  std::string tag(int64_t index) const {
    std::string name;
    check(plans.get_name_at_index(index, name));
    return name;
  }

  PlanNotes notes(int64_t index) const {
    const auto at = static_cast<size_t>(index);
    return {names_of(plans.numeric_notes[at], kNumericalNotes),
            names_of(plans.behavior_notes[at], kBehaviorNotes)};
  }

  bool is_built(int64_t index) const { return plans.is_plan_index_executable(index).is_good(); }
  std::string serialized(int64_t index) const {
    return plans.execution_plans[static_cast<size_t>(index)]->getJsonRepresentation();
  }

  // As the heuristics do: a plan that is asked for by name is then the same as the one they propose.
  void set_processors(fe::detail::backend_descriptor& engine) const {
    const int32_t processors = context.get_target_sm_count();
    if (processors < 0) return;
    const cudnnStatus_t status = fe::detail::set_attribute(
        engine.get_ptr(), CUDNN_ATTR_ENGINE_SM_COUNT_TARGET, CUDNN_TYPE_INT32, 1, &processors);
    if (status != CUDNN_STATUS_SUCCESS) throw BackendNotSupported("cuDNN refuses a number of processors");
  }

  void append(const EngineChoice& choice) {
    fe::detail::backend_descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    set_processors(engine);
    check(fe::detail::create_engine(engine, choice.engine_id, operation_graph->get_raw_desc(),
                                    device_properties));
    std::vector<fe::detail::backend_descriptor> knobs;
    for (const auto& [name, value] : choice.knobs) {
      fe::detail::backend_descriptor knob(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
      const cudnnBackendKnobType_t number = knob_number(name);
      const auto set = [&](cudnnBackendAttributeName_t what, cudnnBackendAttributeType_t type,
                           const void* to) {
        if (fe::detail::set_attribute(knob.get_ptr(), what, type, 1, to) != CUDNN_STATUS_SUCCESS) {
          throw BackendNotSupported("knob " + name + ": cuDNN refuses it");
        }
      };
      set(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, &number);
      set(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, &value);
      if (fe::detail::finalize(knob.get_ptr()) != CUDNN_STATUS_SUCCESS) {
        throw BackendNotSupported("knob " + name + ": cuDNN refuses the value " + std::to_string(value));
      }
      knobs.push_back(std::move(knob));
    }
    auto config = fe::make_shared_backend_pointer(
        static_cast<cudnnBackendDescriptorType_t>(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
    check(fe::detail::create_engine_config(config, engine, knobs));
    plans.enqueue_engine_configs({config});
    check(plans.query_properties());
  }

  // Everything of a plan but what the chosen engine adds: slots, scalars, the frontend's workspace.
  CudnnPlan surroundings() const {
    std::unordered_map<int64_t, pass_by_values_t> values;
    check(collect_pass_by_value_tensors_subtree(values));
    std::unordered_map<int64_t, std::tuple<int64_t, int64_t, std::vector<float>>> in_workspace;
    int64_t offset = 0;
    check(collect_tensors_in_workspace_subtree(in_workspace, offset));
    std::unordered_map<int64_t, std::pair<int64_t, int64_t>> replaced;
    check(collect_variant_pack_replacements_subtree(replaced));

    std::set<int64_t> uids(variant_pack_uids.begin(), variant_pack_uids.end());
    for (const auto& item : values) uids.insert(item.first);
    for (const auto& item : in_workspace) uids.insert(item.first);
    for (const auto& item : replaced) uids.insert(item.first);

    CudnnPlan plan;
    plan.cudnn_version = static_cast<int64_t>(cudnn().version());
    plan.backend_workspace = get_fe_workspace_size_subtree();
    plan.uids.assign(uids.begin(), uids.end());
    std::map<int64_t, size_t> slots;
    for (size_t i = 0; i < plan.uids.size(); ++i) slots[plan.uids[i]] = i;

    std::map<int64_t, std::pair<int64_t, int64_t>> sources;  // target -> source, offset
    for (const auto& [source, target] : replaced) sources[target.first] = {source, target.second};
    for (const auto& [uid, slot] : slots) {
      const auto value = values.find(uid);
      const auto stretch = in_workspace.find(uid);
      const auto source = sources.find(uid);
      if (value != values.end()) {
        plan.scalars.push_back(
            {slot, std::visit([](const auto& number) { return bytes_of(&number, 1); }, value->second)});
      } else if (stretch != in_workspace.end()) {
        add_stretch(plan, slot, stretch->second);
      } else if (source != sources.end()) {
        plan.aliases.push_back({slot, slots.at(source->second.first), source->second.second});
      } else {
        plan.caller_slots.push_back(slot);
      }
    }
    return plan;
  }

 private:
  static void add_stretch(CudnnPlan& plan, size_t slot,
                          const std::tuple<int64_t, int64_t, std::vector<float>>& stretch) {
    constexpr int64_t kUpload = 0;
    constexpr int64_t kClear = 1;
    const auto& [action, offset, numbers] = stretch;
    plan.scratch.push_back({slot, offset});
    if (action == kUpload) {
      plan.uploads.push_back({offset, bytes_of(numbers.data(), numbers.size())});
    } else if (action == kClear) {
      plan.clears.push_back({offset, static_cast<int64_t>(numbers.at(0))});
    }
  }
};

}  // namespace

struct BackendGraph::Lowered {
  std::mutex mutex;
  GraphText text;
  std::optional<int> device;
  std::optional<CudnnHandlePool::Lease> handle;  // the operation graph keeps it
  PlanGraph graph;
  CudnnPlan surroundings;
  std::map<int64_t, TensorLayout> layouts;

  // cuDNN asks the current context which device it plans for.
  template <typename Body>
  auto on_device(Body&& body) {
    std::lock_guard<std::mutex> lock(mutex);
    std::optional<ContextScope> scope;
    if (device) scope.emplace(nullptr, *device);
    return guarded(std::forward<Body>(body));
  }

  void lower() {
    graph.set_io_data_type(lowering::data_type(text.io_data_type))
        .set_intermediate_data_type(lowering::data_type(text.intermediate_data_type))
        .set_compute_data_type(lowering::data_type(text.compute_data_type));
    lowering::Tensors tensors(text, graph);
    lowering::check_slices(text);
    for (size_t i = 0; i < text.nodes.size(); ++i) {
      const auto found = lowering::lowerings().find(text.nodes[i].type);
      if (found == lowering::lowerings().end()) {
        throw BackendNotSupported("node type " + text.nodes[i].type + ": not lowered to the cuDNN backend");
      }
      lowering::NodeReader node(text.nodes[i], i, tensors);
      found->second(node, graph);
      node.finish();
    }
    check(graph.validate());
    layouts = tensors.layouts();
  }

  // A tensor that the caller fills and cuDNN does not know, or the reverse, would be silently left out.
  void check_uids() const {
    std::set<int64_t> wanted;
    for (size_t index : text.inputs) wanted.insert(uid_of(index));
    for (size_t index : text.outputs) wanted.insert(uid_of(index));
    const std::vector<int64_t> reached = surroundings.caller_uids();
    const std::set<int64_t> found(reached.begin(), reached.end());
    for (int64_t uid : wanted) {
      if (found.count(uid) == 0) refuse(uid, "does not reach cuDNN");
    }
    for (int64_t uid : found) {
      if (wanted.count(uid) == 0) refuse(uid, "is asked for by cuDNN and no buffer of the caller");
    }
  }

  [[noreturn]] static void refuse(int64_t uid, const std::string& what) {
    throw BackendNotSupported("graph.tensors[" + std::to_string(uid - 1) + "]: " + what);
  }

  void check_index(int64_t index) const {
    const int64_t count = graph.get_execution_plan_count();
    if (index < 0 || index >= count) {
      throw Error(ErrorKind::kInvalidArgument,
                  "index: got " + std::to_string(index) + ", there are " + std::to_string(count) + " plans");
    }
  }

  void check_built(int64_t index) const {
    check_index(index);
    if (!graph.is_built(index)) {
      throw Error(ErrorKind::kFailedPrecondition, "plan " + std::to_string(index) + " is not built");
    }
  }
};

BackendGraph::BackendGraph(const std::string& graph, std::optional<int> device,
                           const std::optional<std::string>& device_properties)
    : lowered_(std::make_unique<Lowered>()) {
  if (device.has_value() == device_properties.has_value()) {
    throw Error(ErrorKind::kInvalidArgument, "device, device_properties: the rule is one of the two");
  }
  lowered_->text = parse_graph(graph, "graph");
  open_frontend();
  Lowered& lowered = *lowered_;
  if (device) {
    lowered.device = device;
    lowered.on_device([&] {
      lowered.graph.set_sm_version(static_cast<int32_t>(driver().arch(*device)));
      lowered.lower();
      lowered.handle.emplace(cudnn_handles(*device, CudnnHandleUse::kPlan), nullptr);
      check(lowered.graph.build_operation_graph(lowered.handle->get()));
    });
  } else {
    const Json properties = parse_json(*device_properties, "device_properties");
    const auto number = [&properties](const char* name) {
      const auto found = properties.is_object() ? properties.find(name) : properties.end();
      if (!properties.is_object() || found == properties.end() || !found->is_number_unsigned()) {
        throw Error(ErrorKind::kInvalidArgument,
                    std::string("device_properties.") + name + ": expected an integer");
      }
      return found->get<int32_t>();
    };
    const int32_t arch = number("deviceVer") / 10;
    const int32_t processors = number("multiProcessorCount");
    lowered.on_device([&] {
      auto described = std::make_shared<fe::DeviceProperties>();
      check(described->deserialize({device_properties->begin(), device_properties->end()}));
      lowered.graph.set_device_properties(described).set_sm_version(arch).set_sm_count(processors);
      lowered.lower();
      check(lowered.graph.build_operation_graph());
    });
  }
  lowered.surroundings = guarded([&] { return lowered.graph.surroundings(); });
  lowered.check_uids();
}

BackendGraph::~BackendGraph() = default;

int64_t BackendGraph::create_execution_plans(const std::string& mode) {
  static const std::map<std::string, fe::HeurMode_t> kModes = {
      {"A", fe::HeurMode_t::A}, {"B", fe::HeurMode_t::B}, {"FALLBACK", fe::HeurMode_t::FALLBACK}};
  const auto found = kModes.find(mode);
  if (found == kModes.end()) {
    throw Error(ErrorKind::kInvalidArgument, "mode: got " + mode + ", the rule is one of A, B, FALLBACK");
  }
  return lowered_->on_device([&] {
    const int64_t before = lowered_->graph.get_execution_plan_count();
    check(lowered_->graph.create_execution_plans({found->second}));
    return lowered_->graph.get_execution_plan_count() - before;
  });
}

int64_t BackendGraph::create_execution_plan(const EngineChoice& choice) {
  return lowered_->on_device([&] {
    lowered_->graph.append(choice);
    return lowered_->graph.get_execution_plan_count() - 1;
  });
}

int64_t BackendGraph::plan_count() {
  return lowered_->on_device([&] { return lowered_->graph.get_execution_plan_count(); });
}

std::string BackendGraph::plan_name(int64_t index) {
  return lowered_->on_device([&] {
    lowered_->check_index(index);
    return lowered_->graph.tag(index);
  });
}

EngineChoice BackendGraph::plan_engine(int64_t index) { return read_tag(plan_name(index)); }

PlanNotes BackendGraph::plan_notes(int64_t index) {
  return lowered_->on_device([&] {
    lowered_->check_index(index);
    return lowered_->graph.notes(index);
  });
}

void BackendGraph::build_plan(int64_t index) {
  lowered_->on_device([&] {
    lowered_->check_index(index);
    check(lowered_->graph.build_plan_at_index(index));
  });
}

int64_t BackendGraph::plan_workspace(int64_t index) {
  return lowered_->on_device([&] {
    lowered_->check_built(index);
    int64_t bytes = 0;
    check(lowered_->graph.get_workspace_size_plan_at_index(index, bytes));
    return bytes;
  });
}

CudnnPlan BackendGraph::plan(int64_t index) {
  const int64_t workspace = plan_workspace(index);
  return lowered_->on_device([&] {
    CudnnPlan plan = lowered_->surroundings;
    plan.backend = without_stray_bytes(lowered_->graph.serialized(index));
    plan.workspace = workspace;
    return plan;
  });
}

std::vector<int64_t> BackendGraph::uids() { return lowered_->surroundings.caller_uids(); }

std::map<int64_t, TensorLayout> BackendGraph::layouts() { return lowered_->layouts; }

std::vector<std::string> lowered_node_types() {
  std::vector<std::string> types;
  for (const auto& [type, lower] : lowering::lowerings()) types.push_back(type);
  return types;
}

}  // namespace cudnn_jax
