// Tests that ParsedBytes bounds the memory of every message that the server
// parses, and that honest messages pass.
#include "server/wire/parse_cost.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/stubs/logging.h"
#include "gtest/gtest.h"
#include "server/tinker/wire.pb.h"
#include "tests/server/wire/message_mutator.h"
#include "tests/support/status_matchers.h"
#include "weft/v1/adapters.pb.h"
#include "weft/v1/sampling.pb.h"
#include "weft/v1/training.pb.h"

namespace weft::server {
namespace {

using google::protobuf::Message;

// `piece`: the bytes that the stream gives at a time; -1: all.
absl::StatusOr<int64_t> Cost(const google::protobuf::Descriptor& type,
                             const std::string& wire, int piece = -1) {
  const auto size = static_cast<int>(wire.size());
  google::protobuf::io::ArrayInputStream stream(wire.data(), size, piece);
  return ParsedBytes(type, &stream, size);
}

v1::ForwardBackwardRequest Train(int num_data, int tokens) {
  v1::ForwardBackwardRequest request;
  request.set_adapter_id("an-adapter-with-a-long-name");
  request.mutable_loss()->set_clip_low(0.5);
  for (int i = 0; i < num_data; ++i) {
    v1::Datum* const datum = request.add_data();
    for (int k = 0; k < tokens; ++k) {
      datum->add_tokens(static_cast<uint32_t>(k % 128));
      datum->add_targets(300000);
      datum->add_weights(1);
    }
    datum->set_logprobs_le(std::string(static_cast<size_t>(tokens) * 4, 'a'));
  }
  return request;
}

// A step whose data have no tokens, but spans and inputs of a custom loss.
v1::ForwardBackwardRequest Parts(int num_data) {
  v1::ForwardBackwardRequest request;
  for (int i = 0; i < num_data; ++i) {
    v1::Datum* const datum = request.add_data();
    for (int k = 0; k < 5; ++k) {
      v1::SampledSpan* const span = datum->add_sampled_spans();
      span->set_sequence_id("a-session:7:0");
      span->set_length(1);
      v1::CustomInput& input =
          (*datum->mutable_custom_inputs())[absl::StrCat("input", k)];
      input.add_shape(1);
      input.set_floats_le("abcd");
    }
  }
  return request;
}

v1::SampleRequest Sample() {
  v1::SampleRequest request;
  request.add_prompt(7);
  v1::StopRule* const stop = request.mutable_config()->mutable_stop();
  stop->add_token_sequences()->add_tokens(6);
  stop->add_byte_strings("a stop that is longer than a short string");
  return request;
}

tinker::ForwardBackwardRequest TinkerTrain(int num_data) {
  tinker::ForwardBackwardRequest request;
  request.set_model_id("m");
  (*request.mutable_loss_fn_config())["beta"] = 1;
  (*request.mutable_loss_fn_config_v2())["clip"].set_text("t");
  for (int i = 0; i < num_data; ++i) {
    tinker::Datum* const datum = request.add_data();
    datum->add_model_input()->mutable_encoded_text()->set_tokens("abcd");
    for (const char* const name : {"weights", "target_tokens"}) {
      tinker::Tensor& tensor = (*datum->mutable_loss_fn_inputs())[name];
      tensor.add_shape(1);
      tensor.mutable_sparse_csr()->set_values("abcd");
    }
  }
  return request;
}

// `fields`: the mutator knows the types of all fields, and changes them, too.
void ExpectBound(const Message& good, bool fields) {
  MessageMutator mutator(7);
  const google::protobuf::LogSilencer silencer;
  int parsed = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string wire;
    const std::unique_ptr<Message> message(good.New());
    message->CopyFrom(good);
    if (fields && mutator.OneIn(3)) mutator.Mutate(message.get());
    wire = message->SerializeAsString();
    if (!wire.empty() && mutator.OneIn(2)) mutator.Mutate(&wire);
    const auto cost = Cost(*good.GetDescriptor(), wire);
    const auto pieces = Cost(*good.GetDescriptor(), wire, 3);
    ASSERT_EQ(cost.ok(), pieces.ok()) << pieces.status();
    EXPECT_EQ(cost.value_or(0), pieces.value_or(0));
    const std::unique_ptr<Message> copy(good.New());
    if (!copy->ParseFromString(wire) || !cost.ok()) continue;
    ++parsed;
    EXPECT_GE(*cost, static_cast<int64_t>(copy->SpaceUsedLong()))
        << copy->ShortDebugString();
  }
  EXPECT_GT(parsed, 1000);
}

TEST(ParseCostTest, BoundsTheMemoryOfEveryMessage) {
  ExpectBound(Train(3, 5), true);
  ExpectBound(Parts(2), true);
  ExpectBound(Sample(), true);
  ExpectBound(TinkerTrain(3), false);
  ExpectBound(v1::CreateAdapterRequest(), true);
  // Many entries, so that growing lists have spare room.
  const v1::ForwardBackwardRequest large = Train(20, 3000);
  // A message's allocation and its place in a list are not in SpaceUsedLong.
  constexpr int64_t kPlaceBytes = 24;
  v1::ForwardBackwardRequest empty;
  for (int i = 0; i < 1000; ++i) empty.add_data();
  for (const v1::ForwardBackwardRequest& request :
       {large, empty, Parts(1000)}) {
    EXPECT_GE(*Cost(*request.GetDescriptor(), request.SerializeAsString()),
              static_cast<int64_t>(request.SpaceUsedLong()) +
                  kPlaceBytes * request.data_size());
  }
}

TEST(ParseCostTest, HonestRequestsPass) {
  // One token a sequence, tokens of a single byte, and the raw form.
  for (const v1::ForwardBackwardRequest& request :
       {Train(4096, 1), Train(4, 200000), Parts(1000)}) {
    const auto cost =
        Cost(*request.GetDescriptor(), request.SerializeAsString());
    EXPECT_TRUE(cost.ok()) << cost.status();
  }
  const tinker::ForwardBackwardRequest tiny = TinkerTrain(4096);
  EXPECT_TRUE(Cost(*tiny.GetDescriptor(), tiny.SerializeAsString()).ok());
  v1::ForwardBackwardRequest raw;
  raw.add_data()->set_tokens_le(std::string(64 << 20, 'a'));
  EXPECT_TRUE(Cost(*raw.GetDescriptor(), raw.SerializeAsString()).ok());
}

TEST(ParseCostTest, RefusesWhatGrows) {
  const auto repeat = [](const std::string& part) {
    std::string wire;
    while (wire.size() < 4 << 20) wire += part;
    return wire;
  };
  const auto& train = *v1::ForwardBackwardRequest::descriptor();
  // Empty messages, unknown strings, numbers and values of another type.
  for (const std::string& part :
       {std::string("\x1a\x00", 2), std::string("\x7a\x00", 2),
        std::string("\x78\x00", 2), std::string("\x08\x00", 2)}) {
    EXPECT_THAT(Cost(train, repeat(part)),
                IsStatus(absl::StatusCode::kResourceExhausted,
                         "ForwardBackwardRequest have so many small parts"));
  }
  v1::SampleRequest sample = Sample();
  for (int i = 0; i < 1 << 20; ++i) {
    sample.mutable_config()->mutable_stop()->add_token_sequences();
  }
  EXPECT_THAT(Cost(*sample.GetDescriptor(), sample.SerializeAsString()),
              IsStatus(absl::StatusCode::kResourceExhausted, "SampleRequest"));
}

TEST(ParseCostTest, RefusesWhatIsNoMessage) {
  // A field cut short, lengths beyond the end, a group, a tag without a number.
  for (const std::string& wire :
       {std::string("\x10"), std::string("\x0a\x05x"), std::string("\x0b\x0c"),
        std::string("\x00\x01", 2), std::string("\x1a\x02\x12\x05", 4)}) {
    EXPECT_THAT(Cost(*v1::ForwardBackwardRequest::descriptor(), wire),
                IsStatus(absl::StatusCode::kInvalidArgument,
                         "is not a ForwardBackwardRequest"));
  }
}

}  // namespace
}  // namespace weft::server
