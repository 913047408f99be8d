#include "src/log/bucket/object_log.h"

#include <chrono>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"

namespace weft::log {
namespace {

// A group commit is small and a request to the store is slow, so a start reads
// this many objects at once.
constexpr size_t kReadAhead = 16;

absl::StatusOr<std::string> GetLogObject(store::ObjectStore& store,
                                         const std::string& key) {
  absl::StatusOr<store::Object> object = store.Get(key, kMaxLogObjectBytes);
  if (absl::IsNotFound(object.status())) {
    return absl::DataLossError(
        absl::StrCat("the log lacks ", store.NameOf(key)));
  }
  WEFT_RETURN_IF_ERROR(object.status());
  return std::move(object->bytes);
}

// Reads an object, and the group to which it refers. Returns it with the bytes
// that were read.
absl::StatusOr<std::pair<LogObject, uint64_t>> ReadLogObject(
    store::ObjectStore& store, const std::string& key) {
  WEFT_ASSIGN_OR_RETURN(const std::string bytes, GetLogObject(store, key));
  WEFT_ASSIGN_OR_RETURN(LogObject object,
                        DecodeLogObject(bytes, store.NameOf(key)));
  if (object.reference.empty()) {
    return std::pair(std::move(object), uint64_t{bytes.size()});
  }
  const std::string group_key = object.reference;
  WEFT_ASSIGN_OR_RETURN(const std::string group,
                        GetLogObject(store, group_key));
  const uint64_t epoch = object.epoch;
  const uint64_t first = object.first_sequence;
  WEFT_ASSIGN_OR_RETURN(object,
                        DecodeLogObject(group, store.NameOf(group_key)));
  if (object.epoch != epoch || object.first_sequence != first) {
    return absl::DataLossError(absl::StrCat(
        store.NameOf(group_key), " is not the group of ", store.NameOf(key)));
  }
  return std::pair(std::move(object), uint64_t{bytes.size() + group.size()});
}

}  // namespace

absl::StatusOr<std::unique_ptr<ObjectLogReader>> ObjectLogReader::Open(
    store::ObjectStore* store, const LogKeys& keys, uint64_t first_place,
    uint64_t first_sequence) {
  std::unique_ptr<ObjectLogReader> reader(
      new ObjectLogReader(store, first_sequence));
  WEFT_RETURN_IF_ERROR(reader->List(keys, first_place));
  return reader;
}

ObjectLogReader::~ObjectLogReader() = default;

absl::Status ObjectLogReader::List(const LogKeys& keys, uint64_t first_place) {
  WEFT_ASSIGN_OR_RETURN(
      objects_, store_.List(keys.Records(), keys.OfPlace(first_place - 1),
                            store::kAllObjects));
  uint64_t place = first_place;
  for (const store::ListedObject& object : objects_) {
    if (keys.PlaceOf(object.key) != place) {
      return absl::DataLossError(
          absl::StrCat("the log lacks ", store_.NameOf(keys.OfPlace(place)),
                       ": the next object is ", object.key));
    }
    total_bytes_ += object.size;
    ++place;
  }
  return absl::OkStatus();
}

void ObjectLogReader::ReadAhead() {
  for (; asked_ < objects_.size() && asked_ < read_ + kReadAhead; ++asked_) {
    coming_.push_back(std::async(std::launch::async,
                                 [&store = store_, key = objects_[asked_].key] {
                                   return ReadLogObject(store, key);
                                 }));
  }
}

void ObjectLogReader::ForgetComing() {
  std::erase_if(forgotten_, [](const Coming& coming) {
    return coming.wait_for(std::chrono::seconds(0)) ==
           std::future_status::ready;
  });
  std::move(coming_.begin(), coming_.end(), std::back_inserter(forgotten_));
  coming_.clear();
  asked_ = read_;
}

bool ObjectLogReader::IsReady(absl::Duration patience) {
  if (next_in_object_ < object_.records.size() || read_ == objects_.size()) {
    return true;
  }
  ReadAhead();
  return coming_.front().wait_for(absl::ToChronoNanoseconds(patience)) ==
         std::future_status::ready;
}

absl::Status ObjectLogReader::ReadObject() {
  ReadAhead();
  const std::string& key = objects_[read_].key;
  absl::StatusOr<std::pair<LogObject, uint64_t>> object = coming_.front().get();
  coming_.pop_front();
  if (store::IsAway(object.status())) {
    ForgetComing();
    return object.status();
  }
  ++read_;
  WEFT_RETURN_IF_ERROR(object.status());
  read_bytes_ += object->second;
  next_in_object_ = 0;
  object_ = std::move(object->first);
  // What an owner wrote after a later one had begun was never answered.
  if (object_.epoch < epoch_) object_.records.clear();
  epoch_ = std::max(epoch_, object_.epoch);
  if (!object_.records.empty() && object_.first_sequence != next_sequence_) {
    return absl::DataLossError(absl::StrCat(
        store_.NameOf(key), " begins with record ", object_.first_sequence,
        " of the log, not with ", next_sequence_));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<LogReader::Record>> ObjectLogReader::Next() {
  while (next_in_object_ == object_.records.size()) {
    if (read_ == objects_.size()) return std::nullopt;
    WEFT_RETURN_IF_ERROR(ReadObject());
  }
  return Record{.sequence = next_sequence_++,
                .bytes = std::move(object_.records[next_in_object_++])};
}

void SegmentPlaces::Add(uint64_t first_sequence, uint64_t place) {
  {
    MutexLock lock(&mu_);
    places_[first_sequence] = place;
  }
  added_.NotifyAll();
}

absl::StatusOr<uint64_t> SegmentPlaces::Wait(uint64_t first_sequence,
                                             absl::Duration timeout) {
  const absl::Time until = SteadyNow() + timeout;
  MutexLock lock(&mu_);
  for (;;) {
    const auto place = places_.find(first_sequence);
    if (place != places_.end()) {
      places_.erase(places_.begin(), place);
      return place->second;
    }
    const absl::Duration left = until - SteadyNow();
    if (left <= absl::ZeroDuration()) {
      return absl::UnavailableError(
          "the records before the snapshot are not in the store yet");
    }
    added_.WaitFor(&mu_, absl::ToChronoNanoseconds(left));
  }
}

absl::Status ObjectLogWriter::BeginSegment(uint64_t first_sequence) {
  places_.Add(first_sequence, next_place_);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ObjectLogWriter::WriteGroup(
    uint64_t first_sequence, const std::vector<std::string>& records) {
  WEFT_ASSIGN_OR_RETURN(
      const std::string bytes,
      PlaceGroup(first_sequence,
                 EncodeLogObject(owner_.epoch(), first_sequence, records)));
  for (bool written = false; !written; ++next_place_) {
    WEFT_RETURN_IF_ERROR(owner_.fenced());
    const absl::Status created =
        store_.Create(owner_.keys().OfPlace(next_place_), {bytes}).status();
    written = created.ok();
    // Whatever else the store says, its operator can mend it.
    if (!written && !absl::IsAlreadyExists(created)) {
      return absl::UnavailableError(created.message());
    }
    if (!written) {
      WEFT_ASSIGN_OR_RETURN(written, IsWritten(bytes));
    }
  }
  return bytes.size();
}

absl::StatusOr<std::string> ObjectLogWriter::PlaceGroup(uint64_t first_sequence,
                                                        std::string group) {
  if (group.size() <= max_object_bytes_) return group;
  const std::string key = absl::StrCat(owner_.keys().Groups(), "e",
                                       owner_.epoch(), "-", first_sequence);
  const absl::Status created = store::CreateOnce(store_, key, {group});
  if (!created.ok()) return absl::UnavailableError(created.message());
  return EncodeReference(owner_.epoch(), first_sequence, key);
}

absl::StatusOr<bool> ObjectLogWriter::IsWritten(const std::string& bytes) {
  const std::string key = owner_.keys().OfPlace(next_place_);
  const absl::StatusOr<store::Object> there =
      store_.Get(key, kMaxLogObjectBytes);
  if (there.ok() && there->bytes == bytes) return true;
  uint64_t epoch = owner_.epoch() + 1;  // A later owner has removed it.
  if (!absl::IsNotFound(there.status())) {
    WEFT_RETURN_IF_ERROR(there.status());
    WEFT_ASSIGN_OR_RETURN(const LogObject object,
                          DecodeLogObject(there->bytes, store_.NameOf(key)));
    epoch = object.epoch;
  }
  if (epoch < owner_.epoch()) return false;
  const absl::StatusOr<SeenManifest> seen =
      LookAtManifest(store_, owner_.keys());
  return owner_.Fence(seen.ok() ? seen->manifest.owner : Instance());
}

}  // namespace weft::log
