#include "src/directory/arrivals.h"

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "src/base/status_macros.h"

namespace weft::directory {
namespace {

using nlohmann::json;

constexpr char kSender[] = "from";
constexpr char kAdapter[] = "adapter";
constexpr char kEntryTag[] = "entry";
constexpr char kRefused[] = "refused";

std::string KeyOf(int log) { return absl::StrCat("arrivals/", log); }

// A line of JSON, and then the record.
std::string Encode(const Arrival& arrival) {
  const json fields = {{kSender, arrival.from},
                       {kAdapter, arrival.unit},
                       {kEntryTag, arrival.entry},
                       {kRefused, arrival.refused}};
  return absl::StrCat(
      fields.dump(-1, ' ', false, json::error_handler_t::replace), "\n",
      arrival.record);
}

absl::StatusOr<Arrival> Decode(const std::string& bytes,
                               const std::string& name) {
  const size_t end = bytes.find('\n');
  const json fields =
      json::parse(bytes.substr(0, end), nullptr, /*allow_exceptions=*/false);
  const auto is_text = [&fields](const char* field) {
    return fields.contains(field) && fields[field].is_string();
  };
  if (end == std::string::npos || !fields.is_object() ||
      !fields.contains(kSender) || !fields[kSender].is_number_unsigned() ||
      !is_text(kAdapter) || !is_text(kEntryTag) || !is_text(kRefused)) {
    return absl::DataLossError(absl::StrCat(name, " is damaged"));
  }
  return Arrival{.from = fields[kSender].get<int>(),
                 .unit = fields[kAdapter].get<std::string>(),
                 .entry = fields[kEntryTag].get<std::string>(),
                 .record = bytes.substr(end + 1),
                 .refused = fields[kRefused].get<std::string>()};
}

}  // namespace

absl::Status AsAnswer(const absl::Status& status) {
  if (absl::IsAborted(status)) return absl::UnavailableError(status.message());
  if (!store::IsAway(status)) return status;
  return absl::UnavailableError(
      absl::StrCat(kStoreAway, ": ", status.message()));
}

absl::Status Arrivals::Send(int to, const Arrival& arrival) {
  if (!answers_()) return absl::UnavailableError(kStoreAway);
  const std::string bytes = Encode(arrival);
  // A larger object could be created twice.
  if (bytes.size() > store::kMaxAtomicBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the record of '", arrival.unit, "' with its stored replies has ",
        bytes.size(), " bytes, a message to another log may have ",
        store::kMaxAtomicBytes,
        ": make more steps, whose replies are smaller"));
  }
  const absl::Status sent = store_.Create(KeyOf(to), {bytes}).status();
  if (!absl::IsAlreadyExists(sent)) return AsAnswer(sent);
  const absl::StatusOr<FoundArrival> found = Find(to);
  const bool is_this = found.ok() && found->arrival.from == arrival.from &&
                       found->arrival.entry == arrival.entry;
  return is_this ? absl::OkStatus() : sent;
}

absl::StatusOr<FoundArrival> Arrivals::Find(int log) const {
  if (!answers_()) return absl::UnavailableError(kStoreAway);
  const std::string key = KeyOf(log);
  const absl::StatusOr<store::Object> object =
      store_.Get(key, store::kMaxAtomicBytes);
  WEFT_RETURN_IF_ERROR(AsAnswer(object.status()));
  WEFT_ASSIGN_OR_RETURN(Arrival arrival,
                        Decode(object->bytes, store_.NameOf(key)));
  return FoundArrival{.arrival = std::move(arrival), .etag = object->etag};
}

absl::Status Arrivals::Refuse(const FoundArrival& found,
                              const std::string& reason) {
  Arrival refused = found.arrival;
  refused.record.clear();
  refused.refused = reason;
  const absl::Status swapped =
      store_.Swap(KeyOf(own_), Encode(refused), found.etag).status();
  // The sender has taken it back.
  return absl::IsAborted(swapped) ? absl::OkStatus() : AsAnswer(swapped);
}

absl::Status Arrivals::Recall(int to, const std::string& entry) {
  const absl::StatusOr<FoundArrival> found = Find(to);
  if (absl::IsNotFound(found.status())) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(found.status());
  const Arrival& arrival = found->arrival;
  return arrival.from == own_ && arrival.entry == entry ? RemoveFrom(to, *found)
                                                        : absl::OkStatus();
}

absl::Status Arrivals::RemoveFrom(int log, const FoundArrival& found) {
  const absl::Status removed = store_.DeleteIf(KeyOf(log), found.etag);
  return absl::IsAborted(removed) ? absl::OkStatus() : AsAnswer(removed);
}

}  // namespace weft::directory
