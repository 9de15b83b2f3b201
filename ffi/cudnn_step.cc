#include "ffi/cudnn_step.h"

#include <array>
#include <atomic>
#include <map>
#include <optional>
#include <utility>

#include "ffi/capture.h"
#include "ffi/counters.h"
#include "ffi/cudnn_backend.h"
#include "ffi/cudnn_graph_text.h"
#include "ffi/cudnn_handles.h"
#include "ffi/cudnn_library.h"
#include "ffi/cudnn_plan.h"
#include "ffi/cudnn_user_handle.h"
#include "ffi/cudnn_version.h"
#include "ffi/driver.h"
#include "ffi/library.h"
#include "ffi/per_device.h"
#include "program_spec.h"

namespace cudnn_jax {
namespace {

// The operands' slots, and room for those of scalars and of the frontend's workspace.
constexpr size_t kMaxSlots = 2 * kMaxArgs;

// What the step was made with, after the checks that need no device.
struct Description {
  std::string field;
  std::string graph;
  CudnnPlan plan;
  EngineChoice engine;
  bool pinned = false;          // no other plan may stand in for this one
  std::map<int64_t, Arg> args;  // by uid
  int64_t workspace_offset = 0;
  int64_t workspace_bytes = 0;

  void check(const CudnnPlan& candidate) const {
    const auto refuse = [this](const std::string& what) {
      throw Error(ErrorKind::kInvalidArgument, field + what);
    };
    if (candidate.uids.size() > kMaxSlots) {
      refuse(".plan: has " + std::to_string(candidate.uids.size()) + " slots, the rule is at most " +
             std::to_string(kMaxSlots));
    }
    for (int64_t uid : candidate.caller_uids()) {
      if (args.count(uid) == 0) refuse(".uids: lacks " + std::to_string(uid) + ", which the plan fills");
    }
    if (candidate.caller_slots.size() != args.size()) {
      refuse(".uids: has " + std::to_string(args.size()) + " entries, the plan fills " +
             std::to_string(candidate.caller_slots.size()));
    }
    if (candidate.workspace > workspace_bytes) {
      refuse(".workspace: has " + std::to_string(workspace_bytes) + " bytes, the plan needs " +
             std::to_string(candidate.workspace));
    }
  }
};

// A plan on one device. Nothing that a run reads changes, so any number of calls run it at once, each with a
// handle of its own.
class LoadedPlan {
 public:
  LoadedPlan(const Description& step, CudnnPlan plan, int device)
      : plan_(std::move(plan)),
        workspace_offset_(step.workspace_offset),
        handles_(cudnn_handles(device, CudnnHandleUse::kRun)),
        descriptor_(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) {
    for (int64_t uid : plan_.caller_uids()) args_.push_back(step.args.at(uid));
    handles_.prepare();
    const CudnnHandlePool::Lease lease(handles_, nullptr);
    cudnnHandle_t handle = lease.get();
    descriptor_.set(CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                    static_cast<int64_t>(plan_.backend.size()), plan_.backend.data());
    descriptor_.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    descriptor_.finalize("cudnnBackendFinalize of the plan");
  }

  void run(const Call& call) const {
    std::byte* workspace = plan_.workspace > 0 ? call.workspace + workspace_offset_ : nullptr;
    std::array<void*, kMaxSlots> pointers;
    for (size_t i = 0; i < args_.size(); ++i) pointers[plan_.caller_slots[i]] = call.pointer(args_[i]);
    // Host memory: cuDNN copies a scalar's value into the launch.
    for (const auto& item : plan_.scalars) pointers[item.slot] = const_cast<uint8_t*>(item.bytes.data());
    for (const auto& item : plan_.scratch) pointers[item.slot] = workspace + item.offset;
    for (const auto& item : plan_.aliases) {
      pointers[item.slot] = static_cast<std::byte*>(pointers[item.source]) + item.offset;
    }

    for (const auto& item : plan_.clears) {
      driver().fill(workspace + item.offset, 0, static_cast<size_t>(item.bytes), call.stream);
    }
    for (const auto& item : plan_.uploads) {
      // A captured graph reads the source when it is launched: the plan outlives it, as the program does.
      driver().copy_to_device(workspace + item.offset, item.bytes.data(), item.bytes.size(), call.stream);
    }

    void* backend_workspace = workspace == nullptr ? nullptr : workspace + plan_.backend_workspace;
    const auto count = static_cast<int64_t>(plan_.uids.size());
    const auto launch = [&](cudnnHandle_t handle, CudnnDescriptor& pack) {
      pack.clear();
      pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers.data());
      pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, plan_.uids.data());
      pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &backend_workspace);
      pack.finalize("cudnnBackendFinalize of the variant pack");
      std::optional<RelaxedCapture> relaxed;
      if (!executed_.load(std::memory_order_relaxed)) relaxed.emplace();
      cudnn().check(execute(handle, pack.get()), "cudnnBackendExecute");
      if (relaxed.has_value()) executed_.store(true, std::memory_order_relaxed);
    };
    if (call.handle != nullptr) {
      const UserHandle::Use use(*call.handle, call.stream);
      launch(static_cast<cudnnHandle_t>(use.get()), use.variant_pack());
    } else {
      const CudnnHandlePool::Lease lease(handles_, call.stream);
      launch(lease.get(), lease.variant_pack());
    }
  }

 private:
  cudnnStatus_t execute(cudnnHandle_t handle, cudnnBackendDescriptor_t pack) const {
    const LibraryCall measured;
    return cudnn().execute(handle, descriptor_.get(), pack);
  }

  const CudnnPlan plan_;
  const int64_t workspace_offset_;
  std::vector<Arg> args_;  // by caller slot
  CudnnHandlePool& handles_;
  CudnnDescriptor descriptor_;
  mutable std::atomic<bool> executed_{false};
};

// Builds the plan again from the step's graph: first the same engine with the same knobs, then, unless the
// plan is pinned, whatever cuDNN proposes. The program's workspace is fixed, so a plan that needs more is
// none.
CudnnPlan rebuild(const Description& step, int device) {
  BackendGraph graph(step.graph, device, std::nullopt);
  std::string reason = "the plan names no engine";
  const auto build = [&](int64_t index) -> std::optional<CudnnPlan> {
    try {
      graph.build_plan(index);
      CudnnPlan plan = graph.plan(index);
      step.check(plan);
      return plan;
    } catch (const Error& error) {
      reason = error.what();
      return std::nullopt;
    }
  };
  const auto attempt = [&](auto&& append) -> std::optional<CudnnPlan> {
    const int64_t before = graph.plan_count();
    try {
      append();
    } catch (const Error& error) {
      reason = error.what();
      return std::nullopt;
    }
    for (int64_t index = before; index < graph.plan_count(); ++index) {
      if (std::optional<CudnnPlan> plan = build(index)) return plan;
    }
    return std::nullopt;
  };

  if (step.engine.engine_id >= 0) {
    if (auto plan = attempt([&] { graph.create_execution_plan(step.engine); })) return std::move(*plan);
  }
  if (step.pinned) throw BackendNotSupported("pinned to its engine: " + reason);
  for (const char* mode : {"A", "FALLBACK"}) {
    if (auto plan = attempt([&] { graph.create_execution_plans(mode); })) return std::move(*plan);
  }
  throw BackendNotSupported(reason);
}

std::unique_ptr<LoadedPlan> load_plan(const Description& step, int device) {
  const int64_t here = cudnn_version();
  std::string reason = "the versions differ";
  if (here == step.plan.cudnn_version) {
    try {
      return std::make_unique<LoadedPlan>(step, step.plan, device);
    } catch (const CudnnRefusal& error) {
      reason = error.what();  // another build of the same version, say
    }
  }
  try {
    auto loaded = std::make_unique<LoadedPlan>(step, rebuild(step, device), device);
    add(counters().rebuilds);
    return loaded;
  } catch (const LibraryNotFound&) {
    throw;
  } catch (const Error& error) {
    throw Error(ErrorKind::kFailedPrecondition,
                step.field + ".plan: made with cuDNN " + cudnn_version_text(step.plan.cudnn_version) +
                    ", cuDNN " + cudnn_version_text(here) + " is here and does not take it (" + reason +
                    ") and does not build it again (" + error.what() + ")");
  }
}

class CudnnStep final : public Step {
 public:
  explicit CudnnStep(Description description) : description_(std::move(description)) {}

  void load(int device) override {
    plans_.get_or_make(device, [&] { return load_plan(description_, device); });
  }

  void run(const Call& call) const override { plans_.find(call.device)->run(call); }

 private:
  const Description description_;
  PerDevice<LoadedPlan> plans_;
};

}  // namespace

std::unique_ptr<Step> make_cudnn_step(const Json& step, ProgramContext& context) {
  Description description;
  description.field = context.field;
  description.graph = step.at("graph").get<std::string>();
  const Json::binary_t& plan = step.at("plan").get_binary();
  description.plan = plan_from_bytes(plan.data(), plan.size(), context.field + ".plan");
  description.engine.engine_id = step.at("engine_id").get<int64_t>();
  description.pinned = step.at("pinned").get<bool>();
  description.engine.knobs = step.at("knobs").get<std::map<std::string, int64_t>>();
  const std::vector<Arg> args = context.args(step.at("args"));
  const Json& uids = step.at("uids");
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].kind == Arg::Kind::kImmediate) {
      throw Error(ErrorKind::kInvalidArgument,
                  context.field + ".args[" + std::to_string(i) + "]: cuDNN takes buffers only");
    }
    if (!description.args.emplace(uids[i].get<int64_t>(), args[i]).second) {
      throw Error(ErrorKind::kInvalidArgument,
                  context.field + ".uids[" + std::to_string(i) + "]: " + uids[i].dump() + " comes twice");
    }
  }
  description.workspace_offset = step.at("workspace").at(0).get<int64_t>();
  description.workspace_bytes = step.at("workspace").at(1).get<int64_t>();
  description.check(description.plan);
  parse_graph(description.graph, context.field + ".graph");
  return std::make_unique<CudnnStep>(std::move(description));
}

}  // namespace cudnn_jax
