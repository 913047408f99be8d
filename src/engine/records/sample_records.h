// Keeps the records of samples (src/request/sample_record.h) for the training
// that follows. With --state-dir each record is a note of the log, so a restart
// keeps it.
//
// A record goes when it was not used for a day. A restart counts as a use. If
// all records exceed --sample-record-bytes, some go, as FairEviction says: the
// longest unused of the tenant with the most bytes. A record with more bytes
// than all may have is not kept.
#ifndef WEFT_SRC_ENGINE_RECORDS_SAMPLE_RECORDS_H_
#define WEFT_SRC_ENGINE_RECORDS_SAMPLE_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/fair_eviction.h"
#include "src/base/observe/metrics.h"
#include "src/base/threads/mutex.h"
#include "src/log/recorder.h"
#include "src/request/sample_record.h"

namespace weft::engine {

// Threads: any.
class SampleRecords {
 public:
  // With `max_bytes` 0 no record is kept. `model` is the base model's
  // fingerprint. The pointers outlive the object.
  SampleRecords(int64_t max_bytes, const std::string& model, const Clock* clock,
                log::Recorder* recorder, prometheus::Registry* registry);

  // Takes the records of an earlier process from its notes. Call it before the
  // methods below, when `recorder` has started. Erases the notes of another
  // base model, whose tokens and experts are other ones, and those that cannot
  // be read.
  void Restore();

  // Keeps a record, in place of one of the same tenant and id. Without room on
  // the disk of the log, a restart will not have it.
  void Put(const SampleRecord& record) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns a record, which counts as used; null if it is gone.
  std::shared_ptr<const SampleRecord> Find(const std::string& tenant,
                                           const std::string& id)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Does what weft::ReplaySamples does with these records. Error, besides:
  // INVALID_ARGUMENT if the request would take more than 512 MiB from them.
  absl::Status Replay(AdapterKey adapter, TrainRequest* request);
  // Returns at most how many bytes Replay takes for the request: what it adds
  // to the data, and a record while it is read.
  int64_t ReplayBytes(const TrainRequest& request) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Removes the records that were not used for a day.
  void DropExpired() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The ids in all rows of a sequence's support, and in the largest one.
  struct SupportSizes {
    int64_t all = 0;
    int64_t largest = 0;
  };
  using Key = std::pair<std::string, std::string>;  // A tenant and an id.
  using Order = FairEviction<const Key*>;
  struct Entry {
    std::shared_ptr<const std::string> bytes;  // The log has the same string.
    absl::Time used;
    size_t routing_width = 0;            // Experts of a token, over all layers.
    std::vector<SupportSizes> supports;  // By sequence.
    Order::Place place;
  };
  using Entries = std::map<Key, Entry>;
  // Bytes of memory for the replay of a request.
  struct ReplaySize {
    int64_t added = 0;    // At most what the data have more after it.
    int64_t spare = 0;    // At most what they need besides during it.
    int64_t largest = 0;  // The largest of the records.
  };

  static SupportSizes SizesOf(const TokenSupport& support);
  ReplaySize Measure(const TrainRequest& request) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // Returns whether a record could be kept if there were no other.
  bool Fits(const SampleRecord& record, const std::string& bytes) const;
  void Add(const SampleRecord& record, std::shared_ptr<const std::string> bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Removes a record, also from the log. Does nothing if there is none.
  void Erase(const Key& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Show() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns the name of a record's note.
  std::string NoteOf(const Key& key) const;

  const int64_t max_bytes_;
  const std::string prefix_;  // The names of notes begin with it.
  const Clock& clock_;
  log::Recorder& recorder_;
  prometheus::Gauge& shown_bytes_;
  prometheus::Gauge& shown_records_;
  prometheus::Counter& dropped_;
  mutable Mutex mu_;
  Entries entries_ ABSL_GUARDED_BY(mu_);
  Order order_ ABSL_GUARDED_BY(mu_);  // The longest unused first.
};

// Convert a record to and from the value of its note. Error: DATA_LOSS if the
// lists do not fit each other.
std::string EncodeSample(const SampleRecord& record);
absl::StatusOr<SampleRecord> DecodeSample(absl::string_view bytes);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_RECORDS_SAMPLE_RECORDS_H_
