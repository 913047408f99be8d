// Tests random requests of every kind. The server must refuse a request with a
// short message, or accept one that later layers can rely on. Seeds are fixed,
// so a failure repeats. Also tests that isolation knows every name of an
// adapter in every request.
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "google/protobuf/stubs/logging.h"
#include "gtest/gtest.h"
#include "server/call/caller.h"
#include "server/wire/file_assembler.h"
#include "server/wire/request_fields.h"
#include "server/wire/request_validation.h"
#include "tests/server/wire/accepted.h"
#include "tests/server/wire/message_mutator.h"
#include "tests/server/wire/refusals.h"

namespace weft::server {
namespace {

// Requests of one kind. They take 0.1 s. The thread sanitizer, which multiplies
// this time, finds no more in one thread, so it gets fewer.
#ifdef _GLIBCXX_TSAN
constexpr int kRequests = 4000;
#else
constexpr int kRequests = 20000;
#endif

// SampleStream validates the SampleRequest in its message.
absl::StatusOr<SampleRequest> Validate(const v1::SampleStreamRequest& request,
                                       const RequestLimits& limits) {
  return weft::server::Validate(request.request(), limits);
}

void ExpectGoodRefusal(const absl::Status& status) {
  const std::string text(status.message());
  const bool lacks = absl::StrContains(text, "needs a tokenizer") ||
                     absl::StrContains(text, "keeps no records");
  EXPECT_EQ(status.code(), lacks ? absl::StatusCode::kFailedPrecondition
                                 : absl::StatusCode::kInvalidArgument)
      << status;
  EXPECT_GT(text.size(), 10);
  EXPECT_LT(text.size(), 400) << text;
  for (const char c : text) {
    EXPECT_TRUE(absl::ascii_isprint(static_cast<unsigned char>(c))) << text;
  }
}

// A type that nobody has declared to isolation.
struct Undeclared {
  std::string adapter;
};

template <typename T>
concept IsRequest = requires(T* request) {
  FieldsOf(request);
};
template <typename T>
concept IsResult = requires(const Caller& caller, T* result) {
  caller.Reveal(result);
};
static_assert(IsRequest<TrainRequest> && !IsRequest<Undeclared>);
static_assert(IsResult<AdapterInfo> && !IsResult<Undeclared>);

// Fields of requests that name no adapter, or none that the caller wrote.
const std::set<std::string>& OtherStrings() {
  static const auto& names = *new std::set<std::string>{
      "name",  "snapshot",    "tenant", "page_token", "key",
      "value", "sequence_id", "graph",  "checkpoint"};
  return names;
}

// Writes "mine" to every field of `message` that names an adapter. Returns
// their number. Fails if the name of a field does not say whether it names one.
int NameAdapters(google::protobuf::Message* message) {
  using google::protobuf::FieldDescriptor;
  const google::protobuf::Reflection& fields = *message->GetReflection();
  int named = 0;
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message->GetDescriptor()->field(i);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      const bool is_set =
          !field->is_repeated() && fields.HasField(*message, field);
      // Only some losses may have one.
      if (field->name() == "teacher" && !is_set) continue;
      const std::unique_ptr<google::protobuf::Message> part(
          fields.GetMessageFactory()
              ->GetPrototype(field->message_type())
              ->New());
      if (is_set) part->CopyFrom(fields.GetMessage(*message, field));
      const int inner = NameAdapters(part.get());
      if (inner == 0) continue;
      EXPECT_FALSE(field->is_repeated()) << field->full_name();
      named += inner;
      NameAdapters(fields.MutableMessage(message, field));
    } else if (field->type() == FieldDescriptor::TYPE_STRING) {
      if (OtherStrings().contains(field->name())) continue;
      EXPECT_TRUE(absl::EndsWith(field->name(), "adapter_id") &&
                  !field->is_repeated())
          << field->full_name() << ": does this field name an adapter?";
      fields.SetString(message, field, "mine");
      ++named;
    }
  }
  return named;
}

// Checks that a tenant's caller qualifies `named` names of adapters.
template <typename Plain>
void ExpectQualified(absl::StatusOr<Plain> plain, int named) {
  ASSERT_TRUE(plain.ok()) << plain.status();
  const TokenEntry token{
      .id = "1", .sha256 = "", .tenant = "acme", .scopes = {}};
  const RequestFields fields = FieldsOf(&*plain);
  EXPECT_TRUE(Caller(token).Qualify(fields).ok());
  int qualified = 0;
  for (const std::string* name :
       {fields.adapter_id, fields.source_adapter_id}) {
    if (name != nullptr && *name == "acme~mine") ++qualified;
  }
  EXPECT_EQ(qualified, named);
}

class RequestFuzzTest : public ::testing::Test {
 protected:
  // Counts accepted and refused requests. If the fuzzer reaches only one
  // outcome, the test fails.
  template <typename Result>
  void Take(const absl::StatusOr<Result>& result,
            const google::protobuf::Message& request) {
    if (result.ok()) {
      ++accepted_;
      ExpectUsable(*result, limits_);
    } else {
      ++refused_;
      ExpectGoodRefusal(result.status());
    }
    if (HasFailure()) FAIL() << request.ShortDebugString();
  }

  // Fuzzes one kind of request, and checks its names.
  template <typename Message>
  void Fuzz(const Message& good) {
    const std::string name(Message::descriptor()->full_name());
    SCOPED_TRACE(name);
    Message mine = good;
    const int named = NameAdapters(&mine);
    ExpectQualified(Validate(mine, limits_), named);
    const std::string good_bytes = good.SerializeAsString();
    accepted_ = refused_ = 0;
    for (int i = 0; i < kRequests && !HasFailure(); ++i) {
      Message request = good;
      if (mutator_.OneIn(4)) {
        std::string bytes = good_bytes;
        mutator_.Mutate(&bytes);
        if (!request.ParseFromString(bytes)) continue;
      } else {
        mutator_.Mutate(&request);
      }
      Take(Validate(request, limits_), request);
    }
    EXPECT_GT(accepted_, 100);
    EXPECT_GT(refused_, 100);
    fuzzed_.insert(name);
  }

  // Fuzzes the messages of an upload of files.
  template <typename Message>
  void FuzzStream(const Message& options);

  const RequestLimits limits_ = Limits();
  MessageMutator mutator_{17};
  // Silences the parser, which logs each string that is not UTF-8.
  google::protobuf::LogSilencer silencer_;
  int accepted_ = 0;
  int refused_ = 0;
  std::set<std::string> fuzzed_;
};

v1::ForwardRequest GoodForward() {
  v1::ForwardRequest request;
  *request.mutable_loss() = GoodTrain().loss();
  *request.mutable_data() = GoodTrain().data();
  return Edited(request, "adapter_id = 'a'; unnumbered = true; snapshot = 's'");
}

// Soft targets, in the form with offsets.
v1::ForwardBackwardRequest GoodSoftTrain() {
  return Edited(GoodTrain(),
                "loss.function = LOSS_FUNCTION_CROSS_ENTROPY; "
                "data[0].target_offsets = [0, 1, 1, 3]");
}

// Three tokens. Each token has two experts in each of two layers.
v1::ForwardBackwardRequest GoodRoutedTrain() {
  return Edited(GoodTrain(),
                "loss.return_routing = true; "
                "data[0].routing_le = '\\0\\0\\1\\0\\2\\0\\3\\0' * 3");
}

// Three tokens with supports, of which the second is empty.
v1::ForwardBackwardRequest GoodSupportedTrain() {
  const auto raw = [](const std::vector<uint32_t>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()),
                       values.size() * sizeof(uint32_t));
  };
  v1::ForwardBackwardRequest request = GoodTrain();
  v1::Datum* const datum = request.mutable_data(0);
  datum->set_support_offsets_le(raw({0, 2, 2, 4}));
  datum->set_support_tokens_le(raw({datum->targets(0), datum->targets(0) + 1,
                                    datum->targets(2) - 1, datum->targets(2)}));
  return request;
}

// Three tokens, of which a recorded sample has drawn the last two.
v1::ForwardBackwardRequest GoodRecordedTrain() {
  return Edited(GoodTrain(),
                "loss.replay_routing = true; loss.replay_support = true; "
                "loss.replay_logprobs = true; clear data[0].logprobs; "
                "data[0].sampled_spans += "
                "{sequence_id: 'record:0' offset: 2 start: 1 length: 1}; "
                "data[0].sampled_spans += "
                "{sequence_id: 'record:0' offset: 4 start: 2 length: 1}");
}

v1::SampleRequest GoodSample() {
  return Edited(v1::SampleRequest(),
                "adapter_id = 'a'; snapshot = 's'; prompt = [1, 2, 3]; "
                "config.max_tokens = 4; config.stop.token_ids = 5; "
                "config.stop.token_sequences = {tokens: 6}");
}

template <typename Message>
Message Named() {
  return Edited(Message(), "adapter_id = 'a'");
}

template <typename Message>
Message TwiceNamed() {
  return Edited(Message(), "adapter_id = 'a'; name = 'n'");
}

// Returns the names of the requests of a file's services.
std::set<std::string> RequestsOf(const google::protobuf::FileDescriptor& file) {
  std::set<std::string> names;
  for (int i = 0; i < file.service_count(); ++i) {
    const auto& service = *file.service(i);
    for (int k = 0; k < service.method_count(); ++k) {
      names.insert(std::string(service.method(k)->input_type()->full_name()));
    }
  }
  return names;
}

TEST_F(RequestFuzzTest, Training) {
  Fuzz(GoodTrain());
  Fuzz(GoodSoftTrain());
  Fuzz(GoodCustom());
  Fuzz(GoodRoutedTrain());
  Fuzz(GoodSupportedTrain());
  Fuzz(GoodRecordedTrain());
  Fuzz(GoodDistillation());
  Fuzz(GoodForward());
  auto optim = Named<v1::OptimStepRequest>();
  optim.mutable_adamw()->set_learning_rate(1e-3);
  Fuzz(optim);
  optim.clear_adamw();
  optim.mutable_muon()->set_learning_rate(1e-3);
  Fuzz(optim);
  Fuzz(Edited(Named<v1::ReportMetricsRequest>(),
              "optim_steps = 3; metrics += {key: 'loss', value: 0.5}"));
  EXPECT_EQ(fuzzed_, RequestsOf(*v1::OptimStepRequest::descriptor()->file()));
}

TEST_F(RequestFuzzTest, Sampling) {
  v1::SampleStreamRequest stream;
  *stream.mutable_request() = GoodSample();
  stream.mutable_request()->clear_snapshot();
  stream.mutable_request()->set_in_flight(true);
  Fuzz(GoodSample());
  Fuzz(stream);
  EXPECT_EQ(fuzzed_, RequestsOf(*v1::SampleRequest::descriptor()->file()));
}

TEST_F(RequestFuzzTest, Profiles) {
  const auto profile = Make<v1::ProfileRequest>("steps = 10; seconds = 1.5");
  Fuzz(profile);
  // The other two requests of the service are empty.
  for (const std::string& name :
       RequestsOf(*v1::ProfileRequest::descriptor()->file())) {
    const auto& type = *google::protobuf::DescriptorPool::generated_pool()
                            ->FindMessageTypeByName(name);
    EXPECT_EQ(type.field_count() > 0, fuzzed_.contains(name)) << name;
  }
}

// Returns a message with a chunk of `file`. Several messages make an import or
// an upload.
template <typename Message>
Message Piece(const std::string& file) {
  Message message;
  message.mutable_chunk()->set_name(file);
  message.mutable_chunk()->set_data("bytes");
  return message;
}

template <typename Message>
void RequestFuzzTest::FuzzStream(const Message& options) {
  const std::vector<Message> good = {
      options, Piece<Message>("adapter_config.json"),
      Piece<Message>("adapter_config.json"),
      Piece<Message>("adapter_model.safetensors")};
  std::vector<Message> mine = good;
  const int named = NameAdapters(&mine.front());
  FileAssembler<Message> whole;
  for (const Message& message : mine) EXPECT_TRUE(whole.Add(message).ok());
  ExpectQualified(whole.Finish(), named);
  for (int i = 0; i < kRequests && !HasFailure(); ++i) {
    std::vector<Message> messages = good;
    mutator_.Mutate(&messages[mutator_.Below(messages.size())]);
    if (mutator_.OneIn(4)) {
      std::swap(messages[mutator_.Below(messages.size())], messages.back());
    }
    if (mutator_.OneIn(4)) messages.resize(mutator_.Below(messages.size()));
    FileAssembler<Message> assembler;
    absl::Status status;
    for (const Message& message : messages) {
      if (status.ok()) status = assembler.Add(message);
    }
    Take(status.ok() ? assembler.Finish() : status,
         messages.empty() ? options : messages.back());
  }
  EXPECT_GT(accepted_, 100);
  EXPECT_GT(refused_, 100);
}

TEST_F(RequestFuzzTest, Adapters) {
  auto create = Named<v1::CreateAdapterRequest>();
  create.mutable_config()->add_target_modules(v1::TARGET_MODULE_Q_PROJ);
  Fuzz(create);
  Fuzz(v1::ListAdaptersRequest());
  ListAdaptersRequest list;
  EXPECT_EQ(FieldsOf(&list).list, &list);
  Fuzz(Named<v1::GetAdapterRequest>());
  Fuzz(Named<v1::DeleteAdapterRequest>());
  Fuzz(Named<v1::MoveAdapterRequest>());
  Fuzz(Named<v1::ListCheckpointsRequest>());
  Fuzz(TwiceNamed<v1::SaveCheckpointRequest>());
  Fuzz(TwiceNamed<v1::LoadCheckpointRequest>());
  Fuzz(TwiceNamed<v1::DeleteCheckpointRequest>());
  Fuzz(TwiceNamed<v1::SetCheckpointTtlRequest>());
  Fuzz(TwiceNamed<v1::DownloadCheckpointRequest>());
  Fuzz(TwiceNamed<v1::PublishSnapshotRequest>());
  Fuzz(TwiceNamed<v1::ReleaseSnapshotRequest>());
  Fuzz(Named<v1::ExportAdapterRequest>());
  std::set<std::string> others =
      RequestsOf(*v1::CreateAdapterRequest::descriptor()->file());
  // The next two tests fuzz these two requests.
  others.erase("weft.v1.ImportAdapterRequest");
  others.erase("weft.v1.UploadCheckpointRequest");
  EXPECT_EQ(fuzzed_, others);
}

TEST_F(RequestFuzzTest, Imports) {
  const auto options =
      Make<v1::ImportAdapterRequest>("options.adapter_id = 'a'");
  FuzzStream(options);
}

TEST_F(RequestFuzzTest, Uploads) {
  const auto options = Make<v1::UploadCheckpointRequest>(
      "options.adapter_id = 'a'; options.name = 'c'");
  FuzzStream(options);
}

}  // namespace
}  // namespace weft::server
