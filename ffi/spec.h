// program_spec.json, and the checks that it describes. Every field of an artifact is checked here before any
// other code looks at it, so that code may rely on types, ranges and indices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/json.h"
#include "ffi/step.h"

namespace cudnn_jax {

class Spec {
 public:
  explicit Spec(const char* text);

  std::string magic() const { return table_.at("magic"); }
  int64_t version() const { return table_.at("version"); }
  int64_t limit(const std::string& name) const { return table_.at("limits").at(name); }
  int64_t dtype_bits(const std::string& dtype) const { return table_.at("dtypes").at(dtype); }
  std::string step_kinds() const;  // "cudnn, fill, host", for messages

  // Fields, types and limits of one record. Steps are only checked to be maps with a known kind: their
  // arguments refer to the rest of the payload, which has to be right first.
  void check_record(const Json& value, const std::string& record, const std::string& field) const;
  // context.field is the step's path.
  void check_step(const Json& step, const ProgramContext& context) const;

 private:
  using Table = nlohmann::ordered_json;  // keeps the file's order, so the first error is a stable one
  struct Site;

  void check_fields(const Json& value, const Table& fields, const std::string& extra, const Site& site) const;
  void check(const Json& value, const Table& type, const Site& site) const;
  void check_boolean(const Json& value, const Table& type, const Site& site) const;
  void check_integer(const Json& value, const Table& type, const Site& site) const;
  void check_number(const Json& value, const Table& type, const Site& site) const;
  void check_text(const Json& value, const Table& type, const Site& site) const;
  void check_name(const Json& value, const Table& type, const Site& site) const;
  void check_binary(const Json& value, const Table& type, const Site& site) const;
  void check_list(const Json& value, const Table& type, const Site& site) const;
  void check_map(const Json& value, const Table& type, const Site& site) const;
  void check_nested_record(const Json& value, const Table& type, const Site& site) const;
  void check_step_shell(const Json& value, const Table& type, const Site& site) const;
  void check_arg(const Json& value, const Table& type, const Site& site) const;
  void check_immediate(const Json& value, const Site& site) const;
  void check_slice(const Json& value, const Table& type, const Site& site) const;

  int64_t bound(const Table& type, const char* key, int64_t otherwise) const;

  Table table_;
};

const Spec& spec();

// A value from an artifact, for messages: printable, on one line and short.
std::string show(const Json& value);

}  // namespace cudnn_jax
