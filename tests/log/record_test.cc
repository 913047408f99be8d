#include "src/log/record.h"

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <set>
#include <string>

#include "absl/strings/str_format.h"
#include "src/log/log.pb.h"
#include "tests/support/status_matchers.h"

namespace weft::log {
namespace {

TrainRequest Train() {
  TrainRequest request;
  request.adapter_id = "a";
  request.step = 7;
  request.loss = {.function = LossFunction::kPpo,
                  .clip_low = 0.5,
                  .clip_high = 1.5,
                  .beta = 0.25,
                  .temperature = 2,
                  .return_entropy = true,
                  .gradient_filter = 1e-3,
                  .return_routing = true};
  request.data = {
      {.tokens = {1, 2, 3},
       .targets = {2, 3, 4},
       .weights = {1, -0.0F, 0.5F},
       .logprobs = {-1, -2, -3},
       .advantages = {1, 2, 3},
       .support = {.offsets = {0, 2, 2, 3}, .tokens = {2, 9, 4}}},
      {.tokens = {5, 6},
       .targets = {1, 2, 3},
       .weights = {1, 2, 3},
       .logprobs = {},
       .advantages = {},
       .target_offsets = {0, 1, 3}},
      {.tokens = {9},
       .targets = {8, 7},
       .weights = {0.5F, 0.5F},
       .logprobs = {},
       .advantages = {},
       .target_offsets = {},
       .targets_per_token = 2,
       .custom_inputs = {{"a", {.shape = {2, 1}, .floats = {1.5F, -0.0F}}},
                         {"b", {.ints = {int64_t{1} << 40}, .is_int = true}}}}};
  request.loss.custom = {.graph = "{}", .inputs = {{"logprobs", 2}, {"a", 0}}};
  return request;
}

LoraConfig Config() {
  return {.rank = 8,
          .alpha = 16.5,
          .target_modules = {TargetModule::kQProj, TargetModule::kLmHead},
          .seed = std::numeric_limits<uint64_t>::max(),
          .overrides = {{.layer = 3,
                         .module = TargetModule::kQProj,
                         .shape = {.rank = 2, .alpha = 1}}}};
}

template <typename T>
T Again(const T& record) {
  Record read = DecodeRecord(Encode(Record(record))).value();
  return std::get<T>(read);
}

// Sets every field of a message. In a oneof it sets the field of this number,
// and all kinds of steps have the number `step_kind`, modulo their count. Sets
// field `changed`, counted from 1, to another value than without `changed`.
class EveryField {
 public:
  EveryField(int record_kind, int step_kind, int changed = 0)
      : record_kind_(record_kind), step_kind_(step_kind), changed_(changed) {}

  void Set(google::protobuf::Message* message) {
    const google::protobuf::Descriptor& type = *message->GetDescriptor();
    for (int i = 0; i < type.field_count(); ++i) {
      const auto* oneof = type.field(i)->real_containing_oneof();
      const int kind = type.name() == "Record" ? record_kind_ : step_kind_;
      if (oneof == nullptr ||
          oneof->field(kind % oneof->field_count()) == type.field(i)) {
        SetField(message, type.field(i));
      }
    }
  }

  // Returns the full name of field `changed`, or nothing if there is none.
  const std::string& changed_name() const { return changed_name_; }

 private:
  using Field = google::protobuf::FieldDescriptor;

  void SetField(google::protobuf::Message* message, const Field* field) {
    const google::protobuf::Reflection& set = *message->GetReflection();
    const bool many = field->is_repeated();
    const bool changes = ++number_ == changed_;
    if (changes) changed_name_ = field->full_name();
    const int number = changes ? number_ + 1000 : number_;
    switch (field->cpp_type()) {
      case Field::CPPTYPE_MESSAGE:
        return Set(many ? set.AddMessage(message, field)
                        : set.MutableMessage(message, field));
      case Field::CPPTYPE_STRING: {
        // Of 16 bytes, which are whole numbers of every type.
        const std::string text = absl::StrFormat("%016d", number);
        return many ? set.AddString(message, field, text)
                    : set.SetString(message, field, text);
      }
      case Field::CPPTYPE_INT32: {
        const bool loss = field->full_name() == "weft.log.proto.Train.function";
        const int value =
            loss ? static_cast<int>(changes ? LossFunction::kForwardKl
                                            : LossFunction::kJs)
                 : number_ % 8 + 1 + (changes ? 1 : 0);
        return many ? set.AddInt32(message, field, value)
                    : set.SetInt32(message, field, value);
      }
      case Field::CPPTYPE_UINT64:
        return many ? set.AddUInt64(message, field, number)
                    : set.SetUInt64(message, field, number);
      case Field::CPPTYPE_INT64:
        return many ? set.AddInt64(message, field, number)
                    : set.SetInt64(message, field, number);
      case Field::CPPTYPE_DOUBLE:
        return set.SetDouble(message, field, number + 0.5);
      case Field::CPPTYPE_BOOL:
        return set.SetBool(message, field, !changes);
      default:
        FAIL() << field->full_name();
    }
  }

  const int record_kind_;
  const int step_kind_;
  const int changed_;
  int number_ = 0;
  std::string changed_name_;
};

TEST(RecordTest, EveryFieldOfTheLogIsReadAndWritten) {
  const int record_kinds =
      proto::Record::descriptor()->oneof_decl(0)->field_count();
  const int step_kinds =
      proto::Request::descriptor()->oneof_decl(0)->field_count();
  ASSERT_GE(step_kinds,
            proto::Result::descriptor()->oneof_decl(0)->field_count());
  for (int i = 0; i < record_kinds * step_kinds; ++i) {
    proto::Record record;
    EveryField(i / step_kinds, i % step_kinds).Set(&record);
    const absl::StatusOr<Record> read =
        DecodeRecord(record.SerializeAsString());
    ASSERT_TRUE(read.ok()) << read.status() << record.DebugString();
    proto::Record again;
    ASSERT_TRUE(again.ParseFromString(Encode(*read)));
    std::string difference;
    google::protobuf::util::MessageDifferencer differencer;
    differencer.ReportDifferencesToString(&difference);
    EXPECT_TRUE(differencer.Compare(record, again)) << difference;
  }
}

// All but the number of the step, and what came of its replay.
TEST(RecordTest, EveryFieldOfARequestIsInItsDigest) {
  const int kinds = proto::Request::descriptor()->oneof_decl(0)->field_count();
  std::set<std::string> silent;
  for (int kind = 0; kind < kinds; ++kind) {
    const auto digest = [kind](int changed, std::string* name) {
      proto::Record record;
      EveryField fields(0, kind, changed);
      fields.Set(record.mutable_begin()->mutable_request());
      *name = fields.changed_name();
      const Record read = DecodeRecord(record.SerializeAsString()).value();
      return PayloadDigest(std::get<BeginRecord>(read).request);
    };
    std::string name;
    const std::string unchanged = digest(0, &name);
    for (int changed = 1;; ++changed) {
      const std::string other = digest(changed, &name);
      if (name.empty()) break;
      // A message has no value of its own.
      const google::protobuf::FieldDescriptor& field =
          *proto::Record::descriptor()->file()->pool()->FindFieldByName(name);
      if (other == unchanged && field.message_type() == nullptr) {
        silent.insert(name);
      }
    }
  }
  EXPECT_EQ(silent,
            (std::set<std::string>{"weft.log.proto.Request.step",
                                   "weft.log.proto.Replayed.tokens",
                                   "weft.log.proto.Replayed.missing",
                                   "weft.log.proto.Replayed.own_tokens",
                                   "weft.log.proto.Replayed.versions"}));
}

TEST(RecordTest, ATrainingRequestKeepsItsDigest) {
  const TrainRequest request = Train();
  const std::string bytes = EncodeBegin(5, AdapterKey{2}, 7, "digest", request);
  const Record read = DecodeRecord(bytes).value();
  const auto& begin = std::get<BeginRecord>(read);
  EXPECT_EQ(begin.work, 5);
  EXPECT_EQ(begin.key, AdapterKey{2});
  EXPECT_EQ(begin.step, 7);
  EXPECT_EQ(begin.digest, "digest");
  EXPECT_EQ(PayloadDigest(begin.request), PayloadDigest(request));
  const auto& train = std::get<TrainRequest>(begin.request);
  EXPECT_EQ(train.loss, request.loss);
  EXPECT_EQ(train.data, request.data);
  EXPECT_EQ(StepOf(begin.request), 7);
  EXPECT_EQ(Encode(Record(begin)), bytes);
}

// The log gets an accepted step in two parts, because its place is known last.
TEST(RecordTest, AnAcceptedStepAndItsPlaceAreOneRecord) {
  AcceptedRecord accepted{
      .step = 7, .digest = "digest", .request = Train(), .note = "note"};
  const std::string bytes =
      Encode(Record(accepted)) + EncodePlace(5, AdapterKey{2});
  const Record read = DecodeRecord(bytes).value();
  accepted.work = 5;
  accepted.key = AdapterKey{2};
  EXPECT_EQ(Encode(read), Encode(Record(accepted)));
  const auto& request = *std::get<AcceptedRecord>(read).request;
  EXPECT_EQ(PayloadDigest(request), PayloadDigest(*accepted.request));
}

TEST(RecordTest, ATrainingRequestKeepsWhatItTookFromRecords) {
  TrainRequest request = Train();
  request.replayed = {
      .tokens = 7, .missing = 2, .own_tokens = 5, .versions = 11};
  const Record read =
      DecodeRecord(EncodeBegin(5, AdapterKey{2}, 7, "digest", request)).value();
  const auto& train =
      std::get<TrainRequest>(std::get<BeginRecord>(read).request);
  EXPECT_EQ(train.replayed, request.replayed);
  EXPECT_EQ(train.data, request.data);
}

TEST(RecordTest, ATeacherKeepsItsDigest) {
  TrainRequest request = Train();
  request.loss.function = LossFunction::kJs;
  request.loss.teacher = {.adapter_id = "teacher", .snapshot = "s"};
  request.data[0].teacher_tokens = {8, 1, 2, 3};
  request.data[0].teacher_offset = -3;
  for (const bool base_model : {false, true}) {
    request.loss.teacher.base_model = base_model;
    const Record read =
        DecodeRecord(EncodeBegin(5, AdapterKey{2}, 7, "digest", request))
            .value();
    const StepRequest& got = std::get<BeginRecord>(read).request;
    EXPECT_EQ(PayloadDigest(got), PayloadDigest(request));
    EXPECT_EQ(std::get<TrainRequest>(got).loss, request.loss);
    EXPECT_EQ(std::get<TrainRequest>(got).data, request.data);
  }
}

TEST(RecordTest, EveryOtherRequestKeepsItsDigest) {
  const StepRequest requests[] = {
      OptimStepRequest{.adapter_id = "a",
                       .step = 3,
                       .adamw = {.learning_rate = 0.5,
                                 .beta1 = 0.1,
                                 .beta2 = 0.2,
                                 .eps = 1e-9,
                                 .weight_decay = 0.3,
                                 .max_grad_norm = 4}},
      OptimStepRequest{.adapter_id = "a",
                       .muon = MuonConfig{.learning_rate = 0.5,
                                          .momentum = 0.1,
                                          .nesterov = false,
                                          .weight_decay = 0.3,
                                          .ns_steps = 7,
                                          .max_grad_norm = 4}},
      OptimStepRequest{.adapter_id = "a", .step = 6, .discard = true},
      SaveCheckpointRequest{.adapter_id = "a", .name = "n", .overwrite = true},
      SaveCheckpointRequest{.adapter_id = "a",
                            .name = "n",
                            .kind = CheckpointKind::kSampler,
                            .metadata = {{"k", "v"}},
                            .ttl_seconds = 60,
                            .keep_newest = 3},
      LoadCheckpointRequest{.adapter_id = "a",
                            .source_adapter_id = "b",
                            .name = "n",
                            .weights_only = true,
                            .tenant = "t",
                            .step = 4},
      PublishSnapshotRequest{.adapter_id = "a", .name = "n", .step = 5}};
  for (const StepRequest& request : requests) {
    const DoneRecord done = Again(
        DoneRecord{.key = AdapterKey{1}, .request = request, .result = {}});
    ASSERT_TRUE(done.request.has_value());
    EXPECT_EQ(done.request->index(), request.index());
    EXPECT_EQ(PayloadDigest(*done.request), PayloadDigest(request));
    EXPECT_EQ(StepOf(*done.request), StepOf(request));
  }
}

TEST(RecordTest, ResultsKeepTheirBits) {
  const float not_a_number = std::numeric_limits<float>::quiet_NaN();
  const TrainResult train{.data = {{.logprobs = {-1.5F, not_a_number},
                                    .losses = {1e-30F, 2},
                                    .entropies = {0.5F},
                                    .routing = {3, 65535}}},
                          .metrics = {{"loss:sum", 0.1}},
                          .step = 9};
  const auto read = std::get<TrainResult>(
      Again(DoneRecord{.key = AdapterKey{1}, .result = train}).result);
  EXPECT_EQ(read.data[0].logprobs[0], -1.5F);
  EXPECT_NE(read.data[0].logprobs[1], read.data[0].logprobs[1]);
  EXPECT_EQ(read.data[0].losses, train.data[0].losses);
  EXPECT_EQ(read.data[0].entropies, train.data[0].entropies);
  EXPECT_EQ(read.data[0].routing, train.data[0].routing);
  EXPECT_EQ(read.metrics, train.metrics);
  EXPECT_EQ(read.step, 9);

  const auto failure = std::get<StepFailure>(
      Again(DoneRecord{.key = AdapterKey{1},
                       .result = StepFailure{absl::DataLossError("gone")}})
          .result);
  EXPECT_THAT(failure.status, IsStatus(absl::StatusCode::kDataLoss, "gone"));
}

TEST(RecordTest, ACheckpointKeepsItsProperties) {
  CheckpointInfo saved{.adapter_id = "a",
                       .name = "n",
                       .last_step = 3,
                       .created_at = absl::FromUnixMicros(1234567),
                       .config = Config(),
                       .kind = CheckpointKind::kSampler,
                       .metadata = {{"k", "v"}},
                       .tenant = "t",
                       .base_model = "b",
                       .base_fingerprint = "f"};
  const auto again = [&saved] {
    return std::get<CheckpointInfo>(
        Again(DoneRecord{.key = AdapterKey{1}, .result = saved}).result);
  };
  const CheckpointInfo read = again();
  EXPECT_EQ(read.kind, saved.kind);
  EXPECT_EQ(read.metadata, saved.metadata);
  EXPECT_EQ(read.expires_at, absl::InfiniteFuture());
  EXPECT_EQ(read.tenant, "t");
  EXPECT_EQ(read.base_model, "b");
  EXPECT_EQ(read.base_fingerprint, "f");
  saved.expires_at = absl::FromUnixMicros(7654321);
  EXPECT_EQ(again().expires_at, saved.expires_at);
}

StepResultPtr Shared(StepResult result) {
  return std::make_shared<const StepResult>(std::move(result));
}

TEST(RecordTest, AnAdapterKeepsItsShapeItsImageAndItsReplies) {
  const Snapshot snapshot{
      .next_key = 12,
      .last_epoch = 34,
      .adapters =
          {{.key = AdapterKey{4},
            .adapter_id = "a",
            .tenant = "t",
            .config = Config(),
            .epoch = 33,
            .last_step = 21,
            .next_step = 23,
            .created_at = absl::FromUnixMicros(1234567),
            .image = ImageRecord{.file = "f",
                                 .optim_steps = 6,
                                 .optimizer = Optimizer::kMuon,
                                 .accumulated_tokens = 8,
                                 .versions = {7, 3},
                                 .snapshots = {{"s", 3}}},
            .replies = {{.step = 20,
                         .digest = "d",
                         .result = Shared(PublishedSnapshot{.version = 3})},
                        {.step = 22,
                         .digest = "l",
                         .result = Shared(AdapterInfo{.adapter_id = "a",
                                                      .config = Config(),
                                                      .snapshots = {"s"}})}}}},
      .accepted = {{.work = 9,
                    .key = AdapterKey{4},
                    .step = 23,
                    .digest = "d",
                    .request = Train()}}};
  const Snapshot read = DecodeSnapshot(*Encode(snapshot)).value();
  EXPECT_EQ(read.next_key, 12);
  EXPECT_EQ(read.last_epoch, 34);
  const StoredAdapter& adapter = read.adapters.at(0);
  EXPECT_EQ(adapter.config, Config());
  EXPECT_EQ(adapter.epoch, 33);
  EXPECT_EQ(adapter.last_step, 21);
  EXPECT_EQ(adapter.next_step, 23);
  EXPECT_EQ(adapter.created_at, absl::FromUnixMicros(1234567));
  EXPECT_EQ(adapter.image->versions, (std::vector<uint64_t>{7, 3}));
  EXPECT_EQ(adapter.image->snapshots.at("s"), 3);
  EXPECT_EQ(adapter.image->optim_steps, 6);
  EXPECT_EQ(adapter.image->optimizer, Optimizer::kMuon);
  EXPECT_EQ(adapter.image->accumulated_tokens, 8);
  EXPECT_EQ(std::get<PublishedSnapshot>(*adapter.replies.at(0).result).version,
            3);
  EXPECT_EQ(std::get<AdapterInfo>(*adapter.replies.at(1).result).config,
            Config());
  EXPECT_EQ(read.accepted.at(0).work, 9);
  EXPECT_EQ(*Encode(read), *Encode(snapshot));
}

TEST(RecordTest, BatchesLoadsRemovalsAndReleasesComeBack) {
  const BatchRecord batch = Again(BatchRecord{
      .slices = {{.work_id = 5, .first_datum = 2, .num_data = 3, .last = true},
                 {.work_id = 6, .first_datum = 0, .num_data = 1}}});
  EXPECT_EQ(batch.slices.at(0),
            (TrainSlice{
                .work_id = 5, .first_datum = 2, .num_data = 3, .last = true}));
  EXPECT_FALSE(batch.slices.at(1).last);
  const LoadCheckpointRequest request{.adapter_id = "a", .name = "n"};
  const LoadedRecord loaded = Again(LoadedRecord{.key = AdapterKey{3},
                                                 .step = 4,
                                                 .digest = "d",
                                                 .request = request,
                                                 .file = "f",
                                                 .optim_steps = 5,
                                                 .last_step = 6,
                                                 .optimizer = Optimizer::kMuon,
                                                 .accumulated_tokens = 8});
  EXPECT_EQ(loaded.file, "f");
  EXPECT_EQ(loaded.optimizer, Optimizer::kMuon);
  EXPECT_EQ(loaded.accumulated_tokens, 8);
  EXPECT_EQ(PayloadDigest(*loaded.request), PayloadDigest(request));
  EXPECT_EQ(Again(SettingsRecord{.settings = "threads=2"}).settings,
            "threads=2");
  EXPECT_EQ(Again(RemovedRecord{.key = AdapterKey{9}}).key, AdapterKey{9});
  EXPECT_EQ(Again(ReleaseRecord{.key = AdapterKey{9}, .name = "s"}).name, "s");
}

TEST(RecordTest, BytesThatAreNoRecordAreDamage) {
  EXPECT_THAT(DecodeRecord("\xff\xff"),
              IsStatus(absl::StatusCode::kDataLoss, ""));
  EXPECT_THAT(DecodeRecord(""), IsStatus(absl::StatusCode::kDataLoss, ""));
  EXPECT_THAT(DecodeSnapshot("\x01"),
              IsStatus(absl::StatusCode::kDataLoss, ""));
}

}  // namespace
}  // namespace weft::log
