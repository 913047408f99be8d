// Tests every refusal of a custom loss over gRPC: its cause, code and message.
#include <nlohmann/json.hpp>
#include <string>

#include "tests/server/wire/refusals.h"

namespace weft::server {
namespace {

using Train = v1::ForwardBackwardRequest;

v1::CustomInput& Input(Train& request, const std::string& name) {
  return (*request.mutable_data(0)->mutable_custom_inputs())[name];
}

TEST(RefusalTest, CustomLosses) {
  ExpectRefusals<Train>(
      GoodCustom(),
      {{"clear loss.custom_loss",
        "loss.custom_loss is required by the function custom"},
       {"loss.function = LOSS_FUNCTION_CROSS_ENTROPY",
        "loss.custom_loss is set, must be absent for every function but"},
       {"loss.function = LOSS_FUNCTION_CROSS_ENTROPY; clear loss.custom_loss",
        "data[0].custom_inputs is set, must be empty for every loss but"},
       {"an operation that is not offered",
        [](Train& r) {
          std::string graph = kCustomGraph;
          graph.replace(graph.find("operator.mul"), 12, "os.system");
          r.mutable_loss()->mutable_custom_loss()->set_graph(graph);
        },
        "loss.custom_loss.graph.nodes[3] (mul) has the target os.system, which "
        "is not offered"},
       {"clear loss.custom_loss.graph",
        "loss.custom_loss.graph is not a JSON object"},
       {"loss.custom_loss.inputs[1].rank = 9",
        "loss.custom_loss.inputs[1].rank is 3, must be in [0, 2]"},
       {"an input that is missing",
        [](Train& r) {
          r.mutable_data(0)->mutable_custom_inputs()->erase("a");
        },
        "data[0].custom_inputs[a] is required"},
       {"data[0].custom_inputs += {key: 'c'}",
        "data[0].custom_inputs[\"c\"] is not an input of the loss"},
       {"data[0].custom_inputs += {key: 'a' value {shape: [3, 1]}}",
        "data[0].custom_inputs[a].shape has 2 dimensions, must have 1"},
       {"data[0].custom_inputs += {key: 'a' "
        "value {shape: 3 floats_le: '1' ints_le: '1'}}",
        "data[0].custom_inputs[a].floats_le and ints_le are both set"},
       {"data[0].custom_inputs += {key: 'a' "
        "value {shape: 3 floats_le: '1234'}}",
        "data[0].custom_inputs[a].floats_le has 4 bytes, must have 3 values of "
        "4 bytes"},
       {"data[0].custom_inputs += {key: 'b' "
        "value {shape: [1, 2] ints_le: '12345678901234567'}}",
        "data[0].custom_inputs[b].ints_le has 17 bytes, must have 2 values"},
       {"data[0].custom_inputs += {key: 'b' value "
        "{shape: [4294967295, 4294967295] ints_le: '1234567890123456'}}",
        "data[0].custom_inputs[b].ints_le has 16 bytes, must have "
        "18446744065119617025 values"},
       {"data[0].weights += 1", "data[0].weights has 1 values, must have 3"},
       {"data[0].weights = 1 * 3",
        "data[0].weights has 3 values, must be empty for the loss custom"},
       {"data[0].targets_per_token = 1",
        "data[0].targets_per_token is 1, must be 0, because logprobs has rank "
        "1"},
       {"loss.custom_loss.inputs[0].rank = 2",
        "data[0].targets_per_token is 0, must be above 0, because logprobs has "
        "rank 2"},
       {"data[0].target_offsets = [0, 1, 2, 3]",
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
  const TrainRequest read = Validate(request, Limits()).value();
  EXPECT_EQ(read.loss.function, LossFunction::kCustom);
  EXPECT_EQ(read.loss.custom.graph, kCustomGraph);
  EXPECT_EQ(read.loss.custom.inputs.size(), 3U);
  const Datum& datum = read.data[0];
  EXPECT_EQ(datum.custom_inputs.at("a").floats,
            (std::vector<float>{1, 2.5F, -3}));
  EXPECT_FALSE(datum.custom_inputs.at("a").is_int);
  EXPECT_EQ(datum.custom_inputs.at("b").ints, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(datum.custom_inputs.at("b").shape, (std::vector<int64_t>{1, 2}));
}

}  // namespace
}  // namespace weft::server
