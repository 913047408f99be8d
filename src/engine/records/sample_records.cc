#include "src/engine/records/sample_records.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "src/base/observe/log.h"
#include "src/log/field_codec.h"
#include "src/log/log.pb.h"

namespace weft::engine {
namespace {

using log::FromRawBytes;
using log::RawBytes;

constexpr absl::Duration kLifetime = absl::Hours(24);
constexpr char kNotePrefix[] = "sample/";
// What an entry takes besides its bytes and its id.
constexpr int64_t kEntryBytes = 256;
// The most bytes that a request takes from records. The log has them in one
// message, with the request's own, and a message has at most 2 GiB.
constexpr int64_t kMaxReplayBytes = int64_t{512} << 20;
// What a token of a datum takes while spans are replayed: an offset of its
// support, and whence its experts came.
constexpr int64_t kSpareTokenBytes = 8;

// Experts take most of a record, and few models have more than 256 of them, so
// that their ids have one byte.
size_t ExpertBytes(const SampleRecord& record) {
  const auto is_wide = [](uint16_t expert) { return expert > 0xFF; };
  const bool wide =
      std::ranges::any_of(record.prompt_routing, is_wide) ||
      std::ranges::any_of(record.sequences, [&](const auto& sequence) {
        return std::ranges::any_of(sequence.routing, is_wide);
      });
  return wide ? sizeof(uint16_t) : 1;
}

std::string RawExperts(const std::vector<uint16_t>& experts, size_t bytes) {
  return bytes > 1 ? RawBytes(experts)
                   : std::string(experts.begin(), experts.end());
}

std::vector<uint16_t> ExpertsFromRaw(const std::string& raw, size_t bytes) {
  if (bytes > 1) return FromRawBytes<uint16_t>(raw);
  const auto* const first = reinterpret_cast<const uint8_t*>(raw.data());
  return {first, first + raw.size()};
}

// Returns whether the lists of the sequence fit each other. `width` is the
// number of a token's experts.
bool IsWhole(const SequenceRecord& sequence, size_t width) {
  const size_t tokens = sequence.tokens.size();
  uint64_t drawn = 0;
  for (const VersionSpan& drawing : sequence.versions) {
    drawn += drawing.tokens;
  }
  const std::vector<uint32_t>& offsets = sequence.support.offsets;
  const bool supports =
      offsets.empty()
          ? sequence.support.tokens.empty()
          : offsets.size() == tokens + 1 && std::ranges::is_sorted(offsets) &&
                offsets.front() == 0 &&
                offsets.back() == sequence.support.tokens.size();
  return tokens > 0 && sequence.logprobs.size() == tokens && drawn == tokens &&
         supports && sequence.routing.size() == (tokens - 1) * width;
}

bool IsWhole(const SampleRecord& record) {
  if (record.num_prompt == 0 ||
      record.prompt_routing.size() % record.num_prompt != 0) {
    return false;
  }
  const size_t width = record.prompt_routing.size() / record.num_prompt;
  return std::ranges::all_of(record.sequences, [&](const auto& sequence) {
    return IsWhole(sequence, width);
  });
}

int64_t BytesOf(const std::string& bytes, const std::string& id) {
  return static_cast<int64_t>(bytes.size() + 2 * id.size()) + kEntryBytes;
}

}  // namespace

std::string EncodeSample(const SampleRecord& record) {
  log::proto::SampleRecord out;
  out.set_tenant(record.tenant);
  out.set_id(record.id);
  out.set_adapter(static_cast<uint64_t>(record.adapter));
  out.set_temperature(record.temperature);
  out.set_edited(record.edited);
  out.set_num_prompt(record.num_prompt);
  out.set_prompt_digest(record.prompt_digest);
  const size_t expert_bytes = ExpertBytes(record);
  out.set_expert_bytes(static_cast<uint32_t>(expert_bytes));
  out.set_prompt_routing(RawExperts(record.prompt_routing, expert_bytes));
  for (const SequenceRecord& sequence : record.sequences) {
    log::proto::SequenceRecord* const to = out.add_sequences();
    to->set_tokens(RawBytes(sequence.tokens));
    to->set_logprobs(RawBytes(sequence.logprobs));
    for (const VersionSpan& drawing : sequence.versions) {
      to->add_versions(drawing.version);
      to->add_num_drawn(drawing.tokens);
    }
    to->set_support_offsets(RawBytes(sequence.support.offsets));
    to->set_support_tokens(RawBytes(sequence.support.tokens));
    to->set_routing(RawExperts(sequence.routing, expert_bytes));
  }
  return out.SerializeAsString();
}

absl::StatusOr<SampleRecord> DecodeSample(absl::string_view bytes) {
  log::proto::SampleRecord in;
  const bool read =
      bytes.size() <= std::numeric_limits<int>::max() &&
      in.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  SampleRecord record{
      .tenant = in.tenant(),
      .id = in.id(),
      .adapter = static_cast<AdapterKey>(in.adapter()),
      .temperature = in.has_temperature() ? in.temperature() : 1,
      .edited = in.edited(),
      .num_prompt = in.num_prompt(),
      .prompt_digest = in.prompt_digest(),
      .prompt_routing = ExpertsFromRaw(in.prompt_routing(), in.expert_bytes()),
      .sequences = {}};
  for (const log::proto::SequenceRecord& sequence : in.sequences()) {
    SequenceRecord& to = record.sequences.emplace_back();
    to.tokens = FromRawBytes<int32_t>(sequence.tokens());
    to.logprobs = FromRawBytes<float>(sequence.logprobs());
    const int spans =
        std::min(sequence.versions_size(), sequence.num_drawn_size());
    for (int i = 0; i < spans; ++i) {
      to.versions.push_back(
          {.version = sequence.versions(i), .tokens = sequence.num_drawn(i)});
    }
    to.support = {.offsets = FromRawBytes<uint32_t>(sequence.support_offsets()),
                  .tokens = FromRawBytes<int32_t>(sequence.support_tokens())};
    to.routing = ExpertsFromRaw(sequence.routing(), in.expert_bytes());
  }
  if (read && IsWhole(record)) return record;
  return absl::DataLossError("cannot decode the record of a sample");
}

SampleRecords::SampleRecords(int64_t max_bytes, const std::string& model,
                             const Clock* clock, log::Recorder* recorder,
                             prometheus::Registry* registry)
    : max_bytes_(max_bytes),
      prefix_(absl::StrCat(kNotePrefix, model, "/")),
      clock_(*clock),
      recorder_(*recorder),
      shown_bytes_(AddGauge(registry, "weft_sample_record_bytes",
                            "Bytes in memory of the records of samples.")),
      shown_records_(AddGauge(registry, "weft_sample_records",
                              "Records of samples, which training replays.")),
      dropped_(AddCounter(registry, "weft_sample_records_dropped_total",
                          "Records that gave way because all together reached "
                          "--sample-record-bytes. If it grows, training finds "
                          "no record of older samples.")) {}

void SampleRecords::Restore() {
  for (const auto& [name, bytes] : recorder_.NotesWith(kNotePrefix)) {
    const absl::StatusOr<SampleRecord> record = DecodeSample(*bytes);
    if (!record.ok() || !name.starts_with(prefix_)) {
      Log(record.ok() ? LogLevel::kInfo : LogLevel::kError,
          "a record of a sample is dropped",
          {{"note", name}, {"error", std::string(record.status().message())}});
      recorder_.EraseNote(name);
      continue;
    }
    MutexLock lock(&mu_);
    if (!Fits(*record, *bytes)) {
      recorder_.EraseNote(name);
      dropped_.Increment();
      continue;
    }
    Add(*record, bytes);
    MakeRoom();
  }
}

bool SampleRecords::Fits(const SampleRecord& record,
                         const std::string& bytes) const {
  // A record of more bytes than a message may have is encoded as none.
  return !bytes.empty() && BytesOf(bytes, record.id) <= max_bytes_;
}

void SampleRecords::Put(const SampleRecord& record) {
  if (max_bytes_ == 0) return;
  const auto bytes = std::make_shared<const std::string>(EncodeSample(record));
  MutexLock lock(&mu_);
  if (!Fits(record, *bytes)) {
    Erase({record.tenant, record.id});
    dropped_.Increment();
    return;
  }
  Add(record, bytes);
  if (recorder_.CheckRoom().ok()) {
    recorder_.PutNote(NoteOf({record.tenant, record.id}), bytes);
  }
  MakeRoom();
}

SampleRecords::SupportSizes SampleRecords::SizesOf(
    const TokenSupport& support) {
  SupportSizes sizes{.all = static_cast<int64_t>(support.tokens.size())};
  for (size_t i = 1; i < support.offsets.size(); ++i) {
    const uint32_t ids = support.offsets[i] - support.offsets[i - 1];
    sizes.largest = std::max<int64_t>(sizes.largest, ids);
  }
  return sizes;
}

void SampleRecords::Add(const SampleRecord& record,
                        std::shared_ptr<const std::string> bytes) {
  Erase({record.tenant, record.id});
  const int64_t size = BytesOf(*bytes, record.id);
  const auto entry = entries_.try_emplace({record.tenant, record.id}).first;
  entry->second = {
      .bytes = std::move(bytes),
      .used = clock_.Now(),
      .routing_width = record.prompt_routing.size() / record.num_prompt,
      .supports = {},
      .place = order_.Add(record.tenant, &entry->first, size)};
  for (const SequenceRecord& sequence : record.sequences) {
    entry->second.supports.push_back(SizesOf(sequence.support));
  }
  Show();
}

void SampleRecords::Erase(const Key& key) {
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) return;
  recorder_.EraseNote(NoteOf(key));
  order_.Remove(entry->second.place);
  entries_.erase(entry);
  Show();
}

void SampleRecords::MakeRoom() {
  while (order_.bytes() > max_bytes_) {
    Erase(*order_.Victim().value());
    dropped_.Increment();
  }
}

void SampleRecords::DropExpired() {
  MutexLock lock(&mu_);
  const absl::Time oldest = clock_.Now() - kLifetime;
  std::vector<Key> expired;
  for (const auto& [tenant, account] : order_.accounts()) {
    for (const Order::Entry& entry : account.entries) {
      if (entries_.at(*entry.value).used >= oldest) break;
      expired.push_back(*entry.value);
    }
  }
  for (const Key& key : expired) Erase(key);
}

std::shared_ptr<const SampleRecord> SampleRecords::Find(
    const std::string& tenant, const std::string& id) {
  std::shared_ptr<const std::string> bytes;
  {
    MutexLock lock(&mu_);
    const auto entry = entries_.find({tenant, id});
    if (entry == entries_.end()) return nullptr;
    entry->second.used = clock_.Now();
    order_.Renew(entry->second.place);
    bytes = entry->second.bytes;
  }
  absl::StatusOr<SampleRecord> record = DecodeSample(*bytes);
  if (!record.ok()) return nullptr;  // Put and Restore keep only whole ones.
  return std::make_shared<const SampleRecord>(*std::move(record));
}

absl::Status SampleRecords::Replay(AdapterKey adapter, TrainRequest* request) {
  const int64_t bytes = Measure(*request).added;
  if (bytes > kMaxReplayBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("data take ", bytes, " bytes from records, the limit is ",
                     kMaxReplayBytes, ": send fewer data a step"));
  }
  return ReplaySamples(
      [this](const std::string& tenant, const std::string& id) {
        return Find(tenant, id);
      },
      adapter, request);
}

SampleRecords::ReplaySize SampleRecords::Measure(
    const TrainRequest& request) const {
  const weft::Replay& replay = request.replay;
  ReplaySize size;
  MutexLock lock(&mu_);
  for (size_t d = 0; d < replay.spans.size(); ++d) {
    const int64_t tokens = request.data[d].num_tokens();
    size_t width = 0;
    int64_t ids = 0;
    for (const SampledSpan& span : replay.spans[d]) {
      const auto named = ParseSequenceId(span.sequence_id);
      const auto found = named ? entries_.find({request.tenant, named->first})
                               : entries_.end();
      if (found == entries_.end()) continue;
      const Entry& entry = found->second;
      if (named->second >= entry.supports.size()) continue;
      size.largest =
          std::max(size.largest, static_cast<int64_t>(entry.bytes->size()));
      if (replay.routing) width = std::max(width, entry.routing_width);
      if (replay.support) {
        const SupportSizes& support = entry.supports[named->second];
        ids += std::min(support.all, support.largest * span.length);
      }
    }
    if (replay.spans[d].empty()) continue;
    size.spare +=
        tokens * kSpareTokenBytes + ids * static_cast<int64_t>(sizeof(int32_t));
    // Logprobs, offsets of supports and the experts.
    size.added += ids * static_cast<int64_t>(sizeof(int32_t)) +
                  tokens * (2 * static_cast<int64_t>(sizeof(float)) +
                            static_cast<int64_t>(width * sizeof(uint16_t)));
  }
  return size;
}

int64_t SampleRecords::ReplayBytes(const TrainRequest& request) const {
  const ReplaySize size = Measure(request);
  // A record that is read is parsed, and converted to at most twice its bytes.
  return size.added + size.spare + 3 * size.largest;
}

std::string SampleRecords::NoteOf(const Key& key) const {
  return absl::StrCat(prefix_, key.first, "/", key.second);
}

void SampleRecords::Show() {
  shown_bytes_.Set(static_cast<double>(order_.bytes()));
  shown_records_.Set(static_cast<double>(entries_.size()));
}

}  // namespace weft::engine
