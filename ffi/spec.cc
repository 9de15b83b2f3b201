#include "ffi/spec.h"

#include <limits>
#include <map>
#include <utility>

#include "ffi/error.h"
#include "program_spec.h"

namespace cudnn_jax {

// Where a value stands while it is checked.
struct Spec::Site {
  std::string field;
  const Json* siblings = nullptr;           // the map that holds it
  const ProgramContext* context = nullptr;  // set while steps are checked

  Site at(std::string inner) const { return {std::move(inner), siblings, context}; }
};

namespace {

[[noreturn]] void fail(const std::string& field, const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument, field + ": " + what);
}

std::string last_name(const std::string& field) {
  const size_t dot = field.rfind('.');
  return dot == std::string::npos ? field : field.substr(dot + 1);
}

template <typename Table>
std::string join_keys(const Table& table) {
  std::string joined;
  for (const auto& item : table.items()) {
    const std::string word = table.is_array() ? item.value().template get<std::string>() : item.key();
    joined += (joined.empty() ? "" : ", ") + word;
  }
  return joined;
}

// A signed 64-bit value; MessagePack's unsigned range reaches further.
bool fits_int64(const Json& value) {
  if (value.is_number_unsigned()) {
    return value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  }
  return value.is_number_integer();
}

}  // namespace

std::string show(const Json& value) {
  constexpr size_t kLongest = 60;
  if (value.is_binary()) return "binary of " + std::to_string(value.get_binary().size()) + " bytes";
  if (value.is_structured() && value.size() > 16)
    return std::string(value.type_name()) + " of " + std::to_string(value.size());
  if (value.is_string() && value.get_ref<const std::string&>().size() > kLongest) {
    return "text of " + std::to_string(value.get_ref<const std::string&>().size()) + " bytes";
  }
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

Spec::Spec(const char* text) : table_(Table::parse(text)) {}

const Spec& spec() {
  static const Spec instance(kProgramSpec);
  return instance;
}

std::string Spec::step_kinds() const { return join_keys(table_.at("steps")); }

int64_t Spec::bound(const Table& type, const char* key, int64_t otherwise) const {
  const auto found = type.find(key);
  if (found == type.end()) return otherwise;
  return found->is_string() ? limit(found->get<std::string>()) : found->get<int64_t>();
}

void Spec::check_record(const Json& value, const std::string& record, const std::string& field) const {
  check_fields(value, table_.at("records").at(record), "", Site{field, nullptr, nullptr});
}

void Spec::check_step(const Json& step, const ProgramContext& context) const {
  const auto& kind = step.at("kind").get_ref<const std::string&>();
  const Table& entry = table_.at("steps").at(kind);
  const char* platform = context.platform == Platform::kCuda ? "cuda" : "cpu";
  bool serves = false;
  for (const auto& name : entry.at("platforms")) serves = serves || name == platform;
  if (!serves) {
    fail(context.field + ".kind", "\"" + kind + "\" steps run on " + join_keys(entry.at("platforms")) +
                                      ", payload.requires.platform is \"" + platform + "\"");
  }
  for (const auto& name : entry.value("needs", Table::array())) {
    const std::string need = name.get<std::string>();
    if (context.requirements->at(need).is_null()) {
      fail("payload.requires." + need,
           "got null, the \"" + kind + "\" step at " + context.field + " needs it");
    }
  }
  check_fields(step, entry.at("fields"), "kind", Site{context.field, nullptr, &context});
}

void Spec::check_fields(const Json& value, const Table& fields, const std::string& extra,
                        const Site& site) const {
  if (!value.is_object()) fail(site.field, "expected a map, got " + show(value));
  const std::string prefix = site.field.empty() ? "" : site.field + ".";
  for (const auto& item : fields.items()) {
    if (!value.contains(item.key())) fail(prefix + item.key(), "missing");
  }
  // A field that refers to a sibling stands below it in the table, so the sibling is known to be sound.
  for (const auto& [name, type] : fields.items()) {
    check(value.at(name), type, Site{prefix + name, &value, site.context});
  }
  for (const auto& item : value.items()) {
    if (item.key() != extra && !fields.contains(item.key())) {
      fail(site.field.empty() ? "artifact" : site.field, "unknown field " + show(item.key()) + ", version " +
                                                             std::to_string(version()) + " has " +
                                                             join_keys(fields));
    }
  }
}

void Spec::check(const Json& value, const Table& type, const Site& site) const {
  using Check = void (Spec::*)(const Json&, const Table&, const Site&) const;
  static const std::map<std::string, Check> kChecks = {
      {"integer", &Spec::check_integer}, {"text", &Spec::check_text}, {"binary", &Spec::check_binary},
      {"list", &Spec::check_list},       {"map", &Spec::check_map},   {"record", &Spec::check_nested_record},
      {"step", &Spec::check_step_shell}, {"arg", &Spec::check_arg},   {"slice", &Spec::check_slice},
      {"number", &Spec::check_number},   {"name", &Spec::check_name}, {"boolean", &Spec::check_boolean},
  };
  if (value.is_null() && type.value("nullable", false)) return;
  (this->*kChecks.at(type.at("type").get<std::string>()))(value, type, site);
}

void Spec::check_boolean(const Json& value, const Table&, const Site& site) const {
  if (!value.is_boolean()) fail(site.field, "expected true or false, got " + show(value));
}

void Spec::check_integer(const Json& value, const Table& type, const Site& site) const {
  if (!value.is_number_integer()) fail(site.field, "expected an integer, got " + show(value));
  const int64_t low = bound(type, "min", std::numeric_limits<int64_t>::min());
  const int64_t high = bound(type, "max", std::numeric_limits<int64_t>::max());
  if (!fits_int64(value) || value.get<int64_t>() < low || value.get<int64_t>() > high) {
    fail(site.field, "got " + show(value) + ", the rule is " + std::to_string(low) +
                         " <= " + last_name(site.field) + " <= " + std::to_string(high));
  }
}

void Spec::check_number(const Json& value, const Table& type, const Site& site) const {
  if (!value.is_number()) fail(site.field, "expected a number, got " + show(value));
  const auto number = value.get<double>();
  const Table& low = type.at("min");
  const Table& high = type.at("max");
  if (!(number >= low.get<double>() && number <= high.get<double>())) {
    fail(site.field, "got " + (value.is_number_float() ? std::to_string(number) : show(value)) +
                         ", the rule is a finite number from " + low.dump() + " to " + high.dump());
  }
}

void Spec::check_text(const Json& value, const Table& type, const Site& site) const {
  if (!value.is_string()) fail(site.field, "expected text, got " + show(value));
  const auto& text = value.get_ref<const std::string&>();
  const auto size = static_cast<int64_t>(text.size());
  const int64_t low = bound(type, "min", 0);
  const int64_t high = bound(type, "max", limit("text_bytes"));
  if (size < low || size > high) {
    fail(site.field, "text of " + std::to_string(size) + " bytes, the rule is " + std::to_string(low) +
                         " to " + std::to_string(high));
  }
  if (const auto choice = type.find("one_of"); choice != type.end()) {
    const Table& words = table_.at(choice->get<std::string>());
    bool known = words.is_object() && words.contains(text);
    if (words.is_array()) {
      for (const auto& word : words) known = known || word == text;
    }
    if (!known) fail(site.field, "got " + show(value) + ", the rule is one of " + join_keys(words));
  }
}

// What is handed on as a C string, and put into messages as it is.
void Spec::check_name(const Json& value, const Table& type, const Site& site) const {
  check_text(value, type, site);
  for (const char c : value.get_ref<const std::string&>()) {
    if (c < '!' || c > '~')
      fail(site.field, "got " + show(value) + ", the rule is printable ASCII, no spaces");
  }
}

void Spec::check_binary(const Json& value, const Table& type, const Site& site) const {
  if (!value.is_binary()) fail(site.field, "expected binary, got " + show(value));
  const auto size = static_cast<int64_t>(value.get_binary().size());
  const int64_t low = bound(type, "min", 0);
  const int64_t high = bound(type, "max", limit("artifact_bytes"));
  if (size < low || size > high) {
    fail(site.field, "binary of " + std::to_string(size) + " bytes, the rule is " + std::to_string(low) +
                         " to " + std::to_string(high));
  }
}

void Spec::check_list(const Json& value, const Table& type, const Site& site) const {
  if (!value.is_array()) fail(site.field, "expected a list, got " + show(value));
  const int64_t high = bound(type, "max", limit("args"));
  if (static_cast<int64_t>(value.size()) > high) {
    fail(site.field,
         "has " + std::to_string(value.size()) + " entries, the rule is at most " + std::to_string(high));
  }
  if (const auto length = type.find("length"); length != type.end() && *length != value.size()) {
    fail(site.field, "has " + std::to_string(value.size()) + " entries, the rule is " + length->dump());
  }
  if (const auto other = type.find("same_length"); other != type.end()) {
    const std::string name = other->get<std::string>();
    const size_t expected = site.siblings->at(name).size();
    if (value.size() != expected) {
      fail(site.field,
           "has " + std::to_string(value.size()) + " entries, " + name + " has " + std::to_string(expected));
    }
  }
  for (size_t i = 0; i < value.size(); ++i) {
    check(value[i], type.at("of"), site.at(site.field + "[" + std::to_string(i) + "]"));
  }
}

void Spec::check_map(const Json& value, const Table& type, const Site& site) const {
  if (!value.is_object()) fail(site.field, "expected a map, got " + show(value));
  const int64_t high = bound(type, "max", limit("args"));
  if (static_cast<int64_t>(value.size()) > high) {
    fail(site.field,
         "has " + std::to_string(value.size()) + " entries, the rule is at most " + std::to_string(high));
  }
  for (const auto& item : value.items()) {
    if (static_cast<int64_t>(item.key().size()) > limit("name_bytes")) {
      fail(site.field, "a key of " + std::to_string(item.key().size()) + " bytes, the rule is at most " +
                           std::to_string(limit("name_bytes")));
    }
    check(item.value(), type.at("of"), site.at(site.field + "[" + show(item.key()) + "]"));
  }
}

void Spec::check_nested_record(const Json& value, const Table& type, const Site& site) const {
  check_fields(value, table_.at("records").at(type.at("of").get<std::string>()), "", site);
}

void Spec::check_step_shell(const Json& value, const Table&, const Site& site) const {
  if (!value.is_object()) fail(site.field, "expected a map, got " + show(value));
  const auto kind = value.find("kind");
  if (kind == value.end()) fail(site.field + ".kind", "missing");
  if (!kind->is_string() || !table_.at("steps").contains(kind->get_ref<const std::string&>())) {
    fail(site.field + ".kind", "got " + show(*kind) + ", the rule is one of " + step_kinds());
  }
}

void Spec::check_arg(const Json& value, const Table& type, const Site& site) const {
  static const char* const kRule =
      "the rule is [\"operand\", index], [\"workspace\", offset] or [\"immediate\", [dtype, number]]";
  if (!value.is_array() || value.size() != 2 || !value[0].is_string()) {
    fail(site.field, "got " + show(value) + ", " + kRule);
  }
  const ProgramContext& context = *site.context;
  const auto& kind = value[0].get_ref<const std::string&>();
  const Table& kinds = type.contains("kinds") ? type.at("kinds") : table_.at("args");
  bool known = false;
  for (const auto& word : kinds) known = known || word == kind;
  if (!known) fail(site.field, "got " + show(value[0]) + ", the rule is one of " + join_keys(kinds));
  if (kind == "immediate") {
    check_immediate(value[1], site);
    return;
  }

  int64_t room = 0;  // bytes from the argument to the end of its buffer
  if (!fits_int64(value[1])) fail(site.field, "got " + show(value) + ", " + kRule);
  const int64_t where = value[1].get<int64_t>();
  if (kind == "operand") {
    const auto count = static_cast<int64_t>(context.operands->size());
    if (where < 0 || where >= count) {
      fail(site.field, "operand " + std::to_string(where) + ", the program has " + std::to_string(count));
    }
    if (type.value("written", false) && where < context.inputs) {
      fail(site.field, "operand " + std::to_string(where) + " is an input and would be written");
    }
    room = (*context.operands)[static_cast<size_t>(where)].bytes;
  } else {
    const int64_t alignment = limit("workspace_alignment");
    if (where < 0 || where >= context.workspace || where % alignment != 0) {
      fail(site.field, "workspace offset " + std::to_string(where) + ", the rule is a multiple of " +
                           std::to_string(alignment) + " below " + std::to_string(context.workspace));
    }
    room = context.workspace - where;
  }
  if (const auto extent = type.find("bytes"); extent != type.end()) {
    const Json& sibling = site.siblings->at(extent->get<std::string>());
    if (!fits_int64(sibling) || sibling.get<int64_t>() > room) {
      fail(site.field,
           extent->get<std::string>() + " is " + show(sibling) + ", the buffer has " + std::to_string(room));
    }
  }
}

void Spec::check_immediate(const Json& value, const Site& site) const {
  const Table& dtypes = table_.at("immediates");
  if (!value.is_array() || value.size() != 2 || !value[0].is_string() ||
      !dtypes.contains(value[0].get_ref<const std::string&>())) {
    fail(site.field,
         "an immediate is [dtype, number] of one of " + join_keys(dtypes) + ", got " + show(value));
  }
  check(value[1], dtypes.at(value[0].get_ref<const std::string&>()), site);
}

void Spec::check_slice(const Json& value, const Table&, const Site& site) const {
  if (!value.is_array() || value.size() != 2 || !fits_int64(value[0]) || !fits_int64(value[1])) {
    fail(site.field, "got " + show(value) + ", the rule is [offset, bytes]");
  }
  const int64_t offset = value[0].get<int64_t>();
  const int64_t bytes = value[1].get<int64_t>();
  const int64_t total = site.context->workspace;
  const int64_t alignment = limit("workspace_alignment");
  if (offset < 0 || bytes < 0 || offset % alignment != 0 || offset > total || bytes > total - offset) {
    fail(site.field, "slice " + show(value) + ", the rule is an offset that is a multiple of " +
                         std::to_string(alignment) + ", inside the workspace of " + std::to_string(total) +
                         " bytes");
  }
}

}  // namespace cudnn_jax
