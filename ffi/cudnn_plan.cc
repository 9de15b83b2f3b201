#include "ffi/cudnn_plan.h"

#include "ffi/error.h"
#include "ffi/json.h"

namespace cudnn_jax {
namespace {

constexpr int64_t kPlanVersion = 1;

// Reads one list of the plan, row by row, and keeps every number in its range.
class Reader {
 public:
  Reader(const Json& plan, std::string field) : plan_(plan), field_(std::move(field)) {}

  const Json& at(const char* name) const {
    const auto found = plan_.find(name);
    if (found == plan_.end()) fail(name, "missing");
    return *found;
  }

  int64_t number(const char* name, const Json& value, int64_t limit) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(limit)) {
      fail(name, "expected an integer from 0 to " + std::to_string(limit));
    }
    return value.get<int64_t>();
  }

  int64_t number(const char* name, int64_t limit) const { return number(name, at(name), limit); }

  // Calls `take` with each row, a list of `width` values.
  template <typename Take>
  void rows(const char* name, size_t width, Take&& take) const {
    const Json& list = at(name);
    if (!list.is_array()) fail(name, "expected a list");
    for (const Json& row : list) {
      if (!row.is_array() || row.size() != width) {
        fail(name, "expected rows of " + std::to_string(width) + " values");
      }
      take(row);
    }
  }

  std::vector<uint8_t> bytes(const char* name, const Json& value) const {
    if (!value.is_binary()) fail(name, "expected binary");
    return value.get_binary();
  }

  [[noreturn]] void fail(const char* name, const std::string& what) const {
    throw Error(ErrorKind::kInvalidArgument, field_ + "." + name + ": " + what);
  }

 private:
  const Json& plan_;
  const std::string field_;
};

constexpr int64_t kLargest = int64_t{1} << 40;

}  // namespace

std::vector<int64_t> CudnnPlan::caller_uids() const {
  std::vector<int64_t> found;
  for (size_t slot : caller_slots) found.push_back(uids[slot]);
  return found;
}

std::vector<uint8_t> to_bytes(const CudnnPlan& plan) {
  Json value = {
      {"version", kPlanVersion},
      {"cudnn", plan.cudnn_version},
      {"backend", Json::binary(std::vector<uint8_t>(plan.backend.begin(), plan.backend.end()))},
      {"workspace", plan.workspace},
      {"backend_workspace", plan.backend_workspace},
      {"uids", plan.uids},
      {"caller", plan.caller_slots},
  };
  for (const char* name : {"scalars", "scratch", "aliases", "clears", "uploads"}) value[name] = Json::array();
  for (const auto& item : plan.scalars) {
    value["scalars"].push_back(Json::array({item.slot, Json::binary(item.bytes)}));
  }
  for (const auto& item : plan.scratch) value["scratch"].push_back(Json::array({item.slot, item.offset}));
  for (const auto& item : plan.aliases) {
    value["aliases"].push_back(Json::array({item.slot, item.source, item.offset}));
  }
  for (const auto& item : plan.clears) value["clears"].push_back(Json::array({item.offset, item.bytes}));
  for (const auto& item : plan.uploads) {
    value["uploads"].push_back(Json::array({item.offset, Json::binary(item.bytes)}));
  }
  return Json::to_msgpack(value);
}

CudnnPlan plan_from_bytes(const uint8_t* data, size_t size, const std::string& field) {
  const Json value = parse_msgpack(data, size, field);
  if (!value.is_object()) throw Error(ErrorKind::kInvalidArgument, field + ": not a cuDNN plan");
  const Reader reader(value, field);
  if (reader.at("version") != kPlanVersion)
    reader.fail("version", "another version of cudnn_jax made this plan");

  CudnnPlan plan;
  plan.cudnn_version = reader.number("cudnn", kLargest);
  const std::vector<uint8_t> backend = reader.bytes("backend", reader.at("backend"));
  plan.backend.assign(backend.begin(), backend.end());
  plan.workspace = reader.number("workspace", kLargest);
  plan.backend_workspace = reader.number("backend_workspace", plan.workspace);
  if (!reader.at("uids").is_array()) reader.fail("uids", "expected a list");
  for (const Json& uid : reader.at("uids")) plan.uids.push_back(reader.number("uids", uid, kLargest));

  std::vector<bool> filled(plan.uids.size());
  const auto slot = [&](const char* name, const Json& index) {
    if (plan.uids.empty()) reader.fail(name, "a slot of no uid");
    return static_cast<size_t>(reader.number(name, index, static_cast<int64_t>(plan.uids.size()) - 1));
  };
  const auto fill = [&](const char* name, const Json& index) {
    const size_t found = slot(name, index);
    if (filled[found]) reader.fail(name, "slot " + std::to_string(found) + " is filled twice");
    filled[found] = true;
    return found;
  };
  // A stretch of the part of the workspace that comes before cuDNN's own.
  const auto stretch = [&](const char* name, const Json& offset, int64_t bytes) {
    return reader.number(name, offset, plan.backend_workspace - bytes);
  };

  if (!reader.at("caller").is_array()) reader.fail("caller", "expected a list");
  for (const Json& index : reader.at("caller")) plan.caller_slots.push_back(fill("caller", index));
  reader.rows("scalars", 2, [&](const Json& row) {
    plan.scalars.push_back({fill("scalars", row[0]), reader.bytes("scalars", row[1])});
  });
  reader.rows("scratch", 2, [&](const Json& row) {
    plan.scratch.push_back({fill("scratch", row[0]), reader.number("scratch", row[1], plan.workspace)});
  });
  reader.rows("aliases", 3, [&](const Json& row) {
    // A run fills aliases in this order, so the source has to be filled by then.
    const size_t source = slot("aliases", row[1]);
    if (!filled[source]) {
      reader.fail("aliases", "slot " + std::to_string(source) + " is not filled before the alias of it");
    }
    plan.aliases.push_back({fill("aliases", row[0]), source, reader.number("aliases", row[2], kLargest)});
  });
  reader.rows("clears", 2, [&](const Json& row) {
    const int64_t bytes = reader.number("clears", row[1], plan.backend_workspace);
    plan.clears.push_back({stretch("clears", row[0], bytes), bytes});
  });
  reader.rows("uploads", 2, [&](const Json& row) {
    std::vector<uint8_t> bytes = reader.bytes("uploads", row[1]);
    const auto count = static_cast<int64_t>(bytes.size());
    if (count > plan.backend_workspace)
      reader.fail("uploads", "longer than the workspace before cuDNN's own");
    plan.uploads.push_back({stretch("uploads", row[0], count), std::move(bytes)});
  });
  for (size_t i = 0; i < filled.size(); ++i) {
    if (!filled[i]) reader.fail("uids", "nothing fills uid " + std::to_string(plan.uids[i]));
  }
  return plan;
}

}  // namespace cudnn_jax
