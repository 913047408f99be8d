// Tests every refusal of a custom loss over gRPC: its cause, code and message.
#include <nlohmann/json.hpp>
#include <string>

#include "tests/server/refusals.h"

namespace weft {
namespace {

using Train = v1::ForwardBackwardRequest;

v1::CustomInput& Input(Train& request, const std::string& name) {
  return (*request.mutable_data(0)->mutable_custom_inputs())[name];
}

TEST(RefusalTest, CustomLosses) {
  const auto loss = [](Train& r) {
    return r.mutable_loss()->mutable_custom_loss();
  };
  ExpectRefusals<Train>(
      GoodCustom(),
      {{"no loss", [](Train& r) { r.mutable_loss()->clear_custom_loss(); },
        "loss.custom_loss is required by the function custom"},
       {"a loss of another function",
        [](Train& r) {
          r.mutable_loss()->set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
        },
        "loss.custom_loss is set, must be absent for every function but"},
       {"inputs of another function",
        [](Train& r) {
          r.mutable_loss()->set_function(v1::LOSS_FUNCTION_CROSS_ENTROPY);
          r.mutable_loss()->clear_custom_loss();
        },
        "data[0].custom_inputs is set, must be empty for every loss but"},
       {"an operation that is not offered",
        [=](Train& r) {
          std::string graph = kCustomGraph;
          graph.replace(graph.find("operator.mul"), 12, "os.system");
          loss(r)->set_graph(graph);
        },
        "loss.custom_loss.graph.nodes[3] (mul) has the target os.system, which "
        "is not offered"},
       {"no graph", [=](Train& r) { loss(r)->clear_graph(); },
        "loss.custom_loss.graph is not a JSON object"},
       {"a rank", [=](Train& r) { loss(r)->mutable_inputs(1)->set_rank(9); },
        "loss.custom_loss.inputs[1].rank is 3, must be in [0, 2]"},
       {"an input that is missing",
        [](Train& r) {
          r.mutable_data(0)->mutable_custom_inputs()->erase("a");
        },
        "data[0].custom_inputs[a] is required"},
       {"an input that nobody reads", [](Train& r) { Input(r, "c"); },
        "data[0].custom_inputs[\"c\"] is no input of the loss"},
       {"dimensions", [](Train& r) { Input(r, "a").add_shape(1); },
        "data[0].custom_inputs[a].shape has 2 dimensions, must have 1"},
       {"both types",
        [](Train& r) { Input(r, "a").set_ints_le(std::string(24, '\0')); },
        "data[0].custom_inputs[a].floats_le and ints_le are both set"},
       {"few values", [](Train& r) { Input(r, "a").set_floats_le("1234"); },
        "data[0].custom_inputs[a].floats_le has 4 bytes, must have 3 values of "
        "4 bytes"},
       {"a part of a value",
        [](Train& r) { Input(r, "b").set_ints_le(std::string(17, '\0')); },
        "data[0].custom_inputs[b].ints_le has 17 bytes, must have 2 values"},
       {"a huge shape",
        [](Train& r) {
          for (uint32_t& size : *Input(r, "b").mutable_shape()) {
            size = UINT32_MAX;
          }
        },
        "data[0].custom_inputs[b].ints_le has 16 bytes, must have "
        "18446744065119617025 values"},
       {"weights", [](Train& r) { r.mutable_data(0)->add_weights(1); },
        "data[0].weights has 1 values, must have 3"},
       {"all weights",
        [](Train& r) {
          for (int i = 0; i < 3; ++i) r.mutable_data(0)->add_weights(1);
        },
        "data[0].weights has 3 values, must be empty for the loss custom"},
       {"targets of two dimensions",
        [](Train& r) { r.mutable_data(0)->set_targets_per_token(1); },
        "data[0].targets_per_token is 1, must be 0, because logprobs has rank "
        "1"},
       {"targets of one dimension",
        [=](Train& r) { loss(r)->mutable_inputs(0)->set_rank(2); },
        "data[0].targets_per_token is 0, must be above 0, because logprobs has "
        "rank 2"},
       {"ragged targets",
        [](Train& r) {
          for (const uint32_t offset : {0, 1, 2, 3}) {
            r.mutable_data(0)->add_target_offsets(offset);
          }
        },
        "data[0].target_offsets has 4 values, must be empty"}});
}

TEST(RefusalTest, ACustomLossOnTooManyData) {
  // 500 nodes run on at most 131,072 / 500 data.
  nlohmann::json graph = nlohmann::json::parse(kCustomGraph);
  const nlohmann::json node = graph["nodes"][4];
  while (graph["nodes"].size() < 501) {
    nlohmann::json more = node;
    more["name"] = "more" + std::to_string(graph["nodes"].size());
    graph["nodes"].insert(graph["nodes"].end() - 1, more);
  }
  Train request = GoodCustom();
  request.mutable_loss()->mutable_custom_loss()->set_graph(graph.dump());
  const v1::Datum datum = request.data(0);
  while (request.data_size() < 262) *request.add_data() = datum;
  RequestLimits limits = Limits();
  limits.max_data = 1000;
  limits.max_tokens = 10'000;
  EXPECT_TRUE(Validate(request, limits).ok())
      << Validate(request, limits).status();
  *request.add_data() = datum;
  EXPECT_EQ(Validate(request, limits).status().message(),
            "data has 263 sequences, must be at most 262 for the 500 nodes and "
            "items of lists of loss.custom_loss.graph: split it");
}

TEST(ValidationTest, ReadsACustomLoss) {
  Train request = GoodCustom();
  float values[] = {1, 2.5F, -3};
  Input(request, "a").set_floats_le(values, sizeof(values));
  const absl::StatusOr<TrainRequest> read = Validate(request, Limits());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->loss.function, LossFunction::kCustom);
  EXPECT_EQ(read->loss.custom.graph, kCustomGraph);
  EXPECT_EQ(read->loss.custom.inputs.size(), 3U);
  const Datum& datum = read->data[0];
  EXPECT_EQ(datum.custom_inputs.at("a").floats,
            (std::vector<float>{1, 2.5F, -3}));
  EXPECT_FALSE(datum.custom_inputs.at("a").is_int);
  EXPECT_EQ(datum.custom_inputs.at("b").ints, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(datum.custom_inputs.at("b").shape, (std::vector<int64_t>{1, 2}));
}

}  // namespace
}  // namespace weft
