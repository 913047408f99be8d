#include "src/log/record.h"

#include <limits>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/log/values.h"

namespace weft::records {
namespace {

// Protobuf stores the size of a message in an int.
constexpr size_t kMaxMessageBytes = std::numeric_limits<int>::max();

bool Parse(absl::string_view bytes, google::protobuf::MessageLite* out) {
  return bytes.size() <= kMaxMessageBytes &&
         out->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

uint64_t Number(AdapterKey key) { return static_cast<uint64_t>(key); }

void Put(const ReplyRecord& reply, log::StoredReply* out) {
  out->set_step(reply.step);
  out->set_digest(reply.digest);
  ToProto(reply.result, out->mutable_result());
}

absl::StatusOr<ReplyRecord> Get(const log::StoredReply& in) {
  ReplyRecord reply{.step = in.step(), .digest = in.digest(), .result = {}};
  WEFT_ASSIGN_OR_RETURN(reply.result, FromProto(in.result()));
  return reply;
}

void Put(const ImageRecord& image, log::Image* out) {
  out->set_file(image.file);
  out->set_optim_steps(image.optim_steps);
  out->set_optimizer(static_cast<int>(image.optimizer));
  out->mutable_versions()->Add(image.versions.begin(), image.versions.end());
  out->mutable_snapshots()->insert(image.snapshots.begin(),
                                   image.snapshots.end());
}

ImageRecord Get(const log::Image& in) {
  return {.file = in.file(),
          .optim_steps = in.optim_steps(),
          .optimizer = static_cast<Optimizer>(in.optimizer()),
          .versions = {in.versions().begin(), in.versions().end()},
          .snapshots = {in.snapshots().begin(), in.snapshots().end()}};
}

void Put(const StoredAdapter& adapter, log::Adapter* out) {
  out->set_key(Number(adapter.key));
  out->set_adapter_id(adapter.adapter_id);
  out->set_tenant(adapter.tenant);
  ToProto(adapter.config, out->mutable_config());
  out->set_epoch(adapter.epoch);
  out->set_last_step(adapter.last_step);
  out->set_next_step(adapter.next_step);
  out->set_created_at_us(absl::ToUnixMicros(adapter.created_at));
  if (adapter.image) Put(*adapter.image, out->mutable_image());
  for (const ReplyRecord& reply : adapter.replies) {
    Put(reply, out->add_replies());
  }
}

absl::StatusOr<StoredAdapter> Get(const log::Adapter& in) {
  StoredAdapter adapter{.key = static_cast<AdapterKey>(in.key()),
                        .adapter_id = in.adapter_id(),
                        .tenant = in.tenant(),
                        .config = FromProto(in.config()),
                        .epoch = in.epoch(),
                        .last_step = in.last_step(),
                        .next_step = in.next_step(),
                        .created_at = absl::FromUnixMicros(in.created_at_us()),
                        .image = {},
                        .replies = {}};
  if (in.has_image()) adapter.image = Get(in.image());
  for (const log::StoredReply& stored : in.replies()) {
    WEFT_ASSIGN_OR_RETURN(ReplyRecord reply, Get(stored));
    adapter.replies.push_back(std::move(reply));
  }
  return adapter;
}

void Put(const StoredAdapter& adapter, log::Record* out) {
  Put(adapter, out->mutable_adapter());
}

void Put(const RemovedRecord& removed, log::Record* out) {
  out->set_removed(Number(removed.key));
}

void PutBegin(uint64_t work, AdapterKey key, uint64_t step,
              const std::string& digest, const StepRequest& request,
              log::Record* out) {
  log::Begin* const begin = out->mutable_begin();
  begin->set_work(work);
  begin->set_adapter(Number(key));
  begin->set_step(step);
  begin->set_digest(digest);
  ToProto(request, begin->mutable_request());
}

void Put(const BeginRecord& begin, log::Record* out) {
  PutBegin(begin.work, begin.key, begin.step, begin.digest, begin.request, out);
}

void Put(const GivenUpRecord& given_up, log::Record* out) {
  out->set_given_up(given_up.work);
}

void Put(const BatchRecord& batch, log::Record* out) {
  for (const sched::TrainSlice& slice : batch.slices) {
    log::Slice* const to = out->mutable_batch()->add_slices();
    to->set_work(slice.work_id);
    to->set_first_datum(slice.first_datum);
    to->set_num_data(slice.num_data);
    to->set_last(slice.last);
  }
}

void Put(const DoneRecord& done, log::Record* out) {
  log::Done* const to = out->mutable_done();
  to->set_adapter(Number(done.key));
  to->set_step(done.step);
  to->set_digest(done.digest);
  if (done.request) ToProto(*done.request, to->mutable_request());
  ToProto(done.result, to->mutable_result());
}

void Put(const LoadedRecord& loaded, log::Record* out) {
  log::Loaded* const to = out->mutable_loaded();
  to->set_adapter(Number(loaded.key));
  to->set_step(loaded.step);
  to->set_digest(loaded.digest);
  ToProto(loaded.request, to->mutable_request());
  to->set_file(loaded.file);
  to->set_optim_steps(loaded.optim_steps);
  to->set_last_step(loaded.last_step);
  to->set_optimizer(static_cast<int>(loaded.optimizer));
}

void Put(const ReleaseRecord& release, log::Record* out) {
  out->mutable_release()->set_adapter(Number(release.key));
  out->mutable_release()->set_name(release.name);
}

void Put(const NoteRecord& note, log::Record* out) {
  out->mutable_note()->set_name(note.name);
  if (note.value) out->mutable_note()->set_value(*note.value);
}

void Put(const SettingsRecord& settings, log::Record* out) {
  out->set_settings(settings.settings);
}

absl::StatusOr<Record> Get(const log::Begin& in) {
  BeginRecord begin{.work = in.work(),
                    .key = static_cast<AdapterKey>(in.adapter()),
                    .step = in.step(),
                    .digest = in.digest(),
                    .request = {}};
  WEFT_ASSIGN_OR_RETURN(begin.request, FromProto(in.request()));
  return begin;
}

absl::StatusOr<Record> Get(const log::Batch& in) {
  BatchRecord batch;
  for (const log::Slice& slice : in.slices()) {
    batch.slices.push_back({.work_id = slice.work(),
                            .first_datum = slice.first_datum(),
                            .num_data = slice.num_data(),
                            .last = slice.last()});
  }
  return batch;
}

absl::StatusOr<Record> Get(const log::Done& in) {
  DoneRecord done{.key = static_cast<AdapterKey>(in.adapter()),
                  .step = in.step(),
                  .digest = in.digest(),
                  .request = {},
                  .result = {}};
  if (in.has_request()) {
    WEFT_ASSIGN_OR_RETURN(done.request, FromProto(in.request()));
  }
  WEFT_ASSIGN_OR_RETURN(done.result, FromProto(in.result()));
  return done;
}

absl::StatusOr<Record> Get(const log::Loaded& in) {
  LoadedRecord loaded{.key = static_cast<AdapterKey>(in.adapter()),
                      .step = in.step(),
                      .digest = in.digest(),
                      .request = {},
                      .file = in.file(),
                      .optim_steps = in.optim_steps(),
                      .last_step = in.last_step(),
                      .optimizer = static_cast<Optimizer>(in.optimizer())};
  WEFT_ASSIGN_OR_RETURN(loaded.request, FromProto(in.request()));
  return loaded;
}

absl::StatusOr<Record> GetKind(const log::Record& in) {
  switch (in.kind_case()) {
    case log::Record::kAdapter:
      return Get(in.adapter());
    case log::Record::kRemoved:
      return RemovedRecord{.key = static_cast<AdapterKey>(in.removed())};
    case log::Record::kBegin:
      return Get(in.begin());
    case log::Record::kGivenUp:
      return GivenUpRecord{.work = in.given_up()};
    case log::Record::kBatch:
      return Get(in.batch());
    case log::Record::kDone:
      return Get(in.done());
    case log::Record::kLoaded:
      return Get(in.loaded());
    case log::Record::kRelease:
      return ReleaseRecord{
          .key = static_cast<AdapterKey>(in.release().adapter()),
          .name = in.release().name()};
    case log::Record::kNote: {
      NoteRecord note{.name = in.note().name(), .value = {}};
      if (in.note().has_value()) note.value = in.note().value();
      return note;
    }
    case log::Record::kSettings:
      return SettingsRecord{.settings = in.settings()};
    case log::Record::KIND_NOT_SET:
      break;
  }
  return absl::DataLossError("a record of an unknown kind");
}

}  // namespace

std::optional<AdapterKey> KeyOf(const Record& record) {
  return std::visit(
      [](const auto& kind) -> std::optional<AdapterKey> {
        if constexpr (requires { kind.key; }) return kind.key;
        return std::nullopt;
      },
      record);
}

std::string Encode(const Record& record) {
  log::Record out;
  std::visit([&out](const auto& kind) { Put(kind, &out); }, record);
  return out.SerializeAsString();
}

std::string EncodeBegin(uint64_t work, AdapterKey key, uint64_t step,
                        const std::string& digest, const StepRequest& request) {
  log::Record out;
  PutBegin(work, key, step, digest, request, &out);
  return out.SerializeAsString();
}

std::string EncodeNote(const std::string& name, const std::string* value) {
  log::Record out;
  out.mutable_note()->set_name(name);
  if (value != nullptr) out.mutable_note()->set_value(*value);
  return out.SerializeAsString();
}

absl::StatusOr<std::string> Encode(const Snapshot& snapshot) {
  log::Snapshot out;
  out.set_next_key(snapshot.next_key);
  out.set_last_epoch(snapshot.last_epoch);
  for (const StoredAdapter& adapter : snapshot.adapters) {
    Put(adapter, out.add_adapters());
  }
  for (const auto& [name, value] : snapshot.notes) {
    log::Note* const note = out.add_notes();
    note->set_name(name);
    note->set_value(*value);
  }
  if (out.ByteSizeLong() > kMaxMessageBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "stored replies and notes make a snapshot of ", out.ByteSizeLong(),
        " bytes, the limit is ", kMaxMessageBytes,
        "; lower --max-stored-reply-bytes or --sample-record-bytes, or let "
        "promised steps end"));
  }
  return out.SerializeAsString();
}

absl::StatusOr<Record> DecodeRecord(absl::string_view bytes) {
  log::Record in;
  if (!Parse(bytes, &in)) {
    return absl::DataLossError("cannot decode a record");
  }
  return GetKind(in);
}

absl::StatusOr<Snapshot> DecodeSnapshot(absl::string_view bytes) {
  log::Snapshot in;
  if (!Parse(bytes, &in)) {
    return absl::DataLossError("cannot decode the snapshot");
  }
  Snapshot snapshot{.next_key = in.next_key(),
                    .last_epoch = in.last_epoch(),
                    .adapters = {},
                    .notes = {}};
  for (const log::Adapter& adapter : in.adapters()) {
    WEFT_ASSIGN_OR_RETURN(StoredAdapter record, Get(adapter));
    snapshot.adapters.push_back(std::move(record));
  }
  for (log::Note& note : *in.mutable_notes()) {
    snapshot.notes[note.name()] =
        std::make_shared<const std::string>(std::move(*note.mutable_value()));
  }
  return snapshot;
}

}  // namespace weft::records
