#include "src/log/bucket/manifest.h"

#include "nlohmann/json.hpp"

namespace weft::log {
namespace {

using nlohmann::json;

// Reads a field of the JSON object into `value`. Returns false if it is missing
// or has another type.
template <typename T>
bool Take(const json& object, const char* name, T* value) {
  const auto field = object.find(name);
  if (field == object.end()) return false;
  if constexpr (std::is_same_v<T, bool>) {
    if (!field->is_boolean()) return false;
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (!field->is_string()) return false;
  } else if (!field->is_number_unsigned()) {
    return false;
  }
  *value = field->get<T>();
  return true;
}

}  // namespace

std::string EncodeManifest(const Manifest& manifest) {
  json object = {{"epoch", manifest.epoch},
                 {"version", manifest.version},
                 {"owner",
                  {{"name", manifest.owner.name},
                   {"process", manifest.owner.process},
                   {"address", manifest.owner.address}}},
                 {"released", manifest.released},
                 {"snapshot",
                  {{"name", manifest.snapshot.name},
                   {"next_sequence", manifest.snapshot.next_sequence},
                   {"place", manifest.snapshot.place}}}};
  // An earlier version refuses no log without these fields.
  if (manifest.drained) object["drained"] = true;
  if (manifest.queued_tokens) {
    object["queued_tokens"] = *manifest.queued_tokens;
  }
  return object.dump(2, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<Manifest> DecodeManifest(const std::string& bytes) {
  const json object = json::parse(bytes, nullptr, false);
  Manifest manifest;
  if (object.is_object() && object.contains("owner") &&
      object["owner"].is_object() && object.contains("snapshot") &&
      object["snapshot"].is_object()) {
    const json& owner = object["owner"];
    const json& snapshot = object["snapshot"];
    if (Take(object, "epoch", &manifest.epoch) &&
        Take(object, "version", &manifest.version) &&
        Take(object, "released", &manifest.released) &&
        Take(owner, "name", &manifest.owner.name) &&
        Take(owner, "process", &manifest.owner.process) &&
        Take(owner, "address", &manifest.owner.address) &&
        Take(snapshot, "name", &manifest.snapshot.name) &&
        Take(snapshot, "next_sequence", &manifest.snapshot.next_sequence) &&
        Take(snapshot, "place", &manifest.snapshot.place) &&
        (!object.contains("drained") ||
         Take(object, "drained", &manifest.drained))) {
      uint64_t queued_tokens = 0;
      if (Take(object, "queued_tokens", &queued_tokens)) {
        manifest.queued_tokens = queued_tokens;
      }
      return manifest;
    }
  }
  return absl::DataLossError("the manifest of the log is damaged");
}

}  // namespace weft::log
