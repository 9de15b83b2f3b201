#include "ffi/json.h"

#include <set>
#include <utility>
#include <vector>

#include "ffi/error.h"
#include "ffi/spec.h"

namespace cudnn_jax {
namespace {

// Builds the value while the reader walks the text, and stops it where a bound is passed.
class BoundedBuilder final : public nlohmann::json_sax<Json> {
 public:
  explicit BoundedBuilder(size_t nesting) : nesting_(nesting) {}

  bool null() override { return put(Json(nullptr)); }
  bool boolean(bool value) override { return put(Json(value)); }
  bool number_integer(number_integer_t value) override { return put(Json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return put(Json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return put(Json(value)); }
  bool string(string_t& value) override { return put(Json(std::move(value))); }
  bool binary(binary_t& value) override {
    if (value.has_subtype()) return fail("an extension type where the rule is binary");
    return put(Json::binary(std::move(value)));
  }

  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& value) override {
    if (open_.back()->contains(value)) return fail("the key '" + value + "' comes twice");
    key_ = std::move(value);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    return fail("damaged or cut off at byte " + std::to_string(position));
  }

  Json take() { return std::move(root_); }
  const std::string& problem() const { return problem_; }

 private:
  bool fail(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
    return false;
  }

  Json* place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[key_] = std::move(value));
  }

  bool put(Json value) {
    place(std::move(value));
    return true;
  }

  bool open(Json value) {
    if (open_.size() >= nesting_) {
      return fail("nested deeper than " + std::to_string(nesting_) + " levels");
    }
    open_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  const size_t nesting_;
  Json root_;
  std::vector<Json*> open_;  // stable: a container only grows while it is innermost
  std::string key_;
  std::string problem_;
};

template <typename Bytes>
Json parse(const Bytes* data, size_t size, Json::input_format_t format, size_t nesting, const char* name,
           const std::string& field) {
  BoundedBuilder builder(nesting);
  const bool ok = Json::sax_parse(data, data + size, &builder, format, /*strict=*/true);
  if (!ok) {
    const std::string why = builder.problem().empty() ? "damaged" : builder.problem();
    throw Error(ErrorKind::kInvalidArgument, field + ": not valid " + name + ", " + why);
  }
  return builder.take();
}

// cuDNN graphs and device properties are flat; this leaves ample room.
constexpr size_t kTextNesting = 32;

}  // namespace

Json parse_msgpack(const uint8_t* data, size_t size, const std::string& field) {
  return parse(data, size, Json::input_format_t::msgpack, static_cast<size_t>(spec().limit("nesting")),
               "MessagePack", field);
}

Json parse_json(std::string_view text, const std::string& field) {
  return parse(text.data(), text.size(), Json::input_format_t::json, kTextNesting, "JSON", field);
}

}  // namespace cudnn_jax
