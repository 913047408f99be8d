// Tests that bad graphs are refused, by their node.
#include "src/request/loss_graph.h"

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using Json = nlohmann::json;

Json Node(const std::string& op, const std::string& name,
          const std::string& target, const Json& args = Json::array(),
          const Json& kwargs = Json::object()) {
  return {{"op", op},
          {"name", name},
          {"target", target},
          {"args", args},
          {"kwargs", kwargs}};
}

Json Ref(const std::string& name) { return {{"ref", name}}; }

// -(logprobs * weights).sum(), with a metric.
Json GoodNodes() {
  return {
      Node("placeholder", "logprobs", "logprobs"),
      Node("placeholder", "weights", "weights"),
      Node("call_function", "mul", "operator.mul",
           {Ref("logprobs"), Ref("weights")}),
      Node("call_method", "sum_1", "sum", Json::array({Ref("mul")})),
      Node("call_function", "neg", "operator.neg", Json::array({Ref("sum_1")})),
      Node("output", "output", "output",
           Json::array({{{"tuple",
                          {Ref("neg"),
                           {{"dict",
                             {{"custom/nll:sum", Ref("neg")},
                              {"custom/a.b/c:mean", Ref("sum_1")}}}}}}}}))};
}

CustomLoss Loss(const Json& nodes) {
  return {.graph = Json({{"format", 1}, {"nodes", nodes}}).dump(),
          .inputs = {{"logprobs", 1}, {"weights", 1}}};
}

TEST(LossGraphTest, ReadsAGraph) {
  const LossGraph graph = ReadLossGraph(Loss(GoodNodes())).value();
  ASSERT_EQ(graph.nodes.size(), 5U);
  EXPECT_EQ(graph.nodes[2].call.operation->name, "mul");
  EXPECT_FALSE(graph.nodes[2].call.of_math);
  EXPECT_EQ(std::get<GraphRef>(graph.nodes[3].args[0].value).node, 2U);
  EXPECT_EQ(graph.loss, 4U);
  ASSERT_EQ(graph.metrics.size(), 2U);
  EXPECT_EQ(graph.metrics[0].name, "custom/a.b/c");
  EXPECT_TRUE(graph.metrics[0].is_mean);
  EXPECT_EQ(graph.metrics[1].name, "custom/nll");
  EXPECT_FALSE(graph.metrics[1].is_mean);
}

TEST(LossGraphTest, ReadsEveryArgument) {
  Json nodes = GoodNodes();
  nodes[2]["args"] = {nullptr,
                      true,
                      -3,
                      0.5,
                      "floor",
                      Json::array({1, 2}),
                      {{"tuple", {1}}},
                      {{"slice", {nullptr, 2, nullptr}}},
                      {{"ellipsis", true}},
                      {{"float", "-inf"}},
                      {{"dtype", "int64"}},
                      {{"device", "cpu"}},
                      {{"layout", "strided"}},
                      {{"memory_format", "contiguous_format"}},
                      Ref("logprobs")};
  const LossGraph graph = ReadLossGraph(Loss(nodes)).value();
  std::vector<size_t> kinds;
  for (const GraphArg& arg : graph.nodes[2].args) {
    kinds.push_back(arg.value.index());
  }
  EXPECT_EQ(kinds,
            (std::vector<size_t>{0, 1, 2, 3, 4, 6, 6, 7, 8, 3, 4, 4, 4, 4, 5}));
}

// A change that makes a good graph bad, and the beginning of the refusal.
struct BadGraph {
  std::string name;
  std::function<void(Json&)> spoil;
  std::string error;
};

void ExpectBad(const std::vector<BadGraph>& rows) {
  for (const BadGraph& row : rows) {
    SCOPED_TRACE(row.name);
    Json nodes = GoodNodes();
    row.spoil(nodes);
    const absl::Status status = ReadLossGraph(Loss(nodes)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::StartsWith("loss.custom_loss.graph." + row.error));
  }
}

TEST(LossGraphTest, RefusesBadNodesByName) {
  ExpectBad(
      {{"unknown function", [](Json& n) { n[2]["target"] = "torch.foo"; },
        "nodes[2] (mul) has the target torch.foo, which is not offered: "
        "server/tinker/README.md lists what is"},
       {"unknown method", [](Json& n) { n[3]["target"] = "foo"; },
        "nodes[3] (sum_1) has the target foo, which is not offered"},
       {"random numbers", [](Json& n) { n[2]["target"] = "torch.rand_like"; },
        "nodes[2] (mul) has the target torch.rand_like"},
       {"another module", [](Json& n) { n[2]["target"] = "os.system"; },
        "nodes[2] (mul) has the target os.system"},
       {"a builtin", [](Json& n) { n[2]["target"] = "eval"; },
        "nodes[2] (mul) has the target eval"},
       {"in place", [](Json& n) { n[3]["target"] = "add_"; },
        "nodes[3] (sum_1) has the target add_"},
       {"to the host", [](Json& n) { n[3]["target"] = "item"; },
        "nodes[3] (sum_1) has the target item"},
       {"backward", [](Json& n) { n[3]["target"] = "backward"; },
        "nodes[3] (sum_1) has the target backward"},
       {"no target", [](Json& n) { n[3].erase("target"); },
        "nodes[3] (sum_1) has the target \"\""},
       {"a target of bytes", [](Json& n) { n[3]["target"] = "a\nb\x01"; },
        "nodes[3] (sum_1) has the target a\\nb\\x01"},
       {"a module", [](Json& n) { n[2]["op"] = "call_module"; },
        "nodes[2] (mul) has the op call_module, must be placeholder"},
       {"a constant", [](Json& n) { n[2]["op"] = "get_attr"; },
        "nodes[2] (mul) has the op get_attr, a tensor that the function holds"},
       {"no op", [](Json& n) { n[2].erase("op"); },
        "nodes[2] (mul) has the op \"\", must be placeholder"},
       {"no object", [](Json& n) { n[2] = 7; }, "nodes[2] must be an object"},
       {"no name", [](Json& n) { n[2].erase("name"); },
        "nodes[2] has the name \"\", must be 1 to 128 letters"},
       {"a bad name", [](Json& n) { n[2]["name"] = "a b"; },
        "nodes[2] has the name \"a b\", must be"},
       {"a long name", [](Json& n) { n[2]["name"] = std::string(129, 'a'); },
        "nodes[2] has the name \"aaa"},
       {"a name twice", [](Json& n) { n[3]["name"] = "mul"; },
        "nodes[3] (mul) has the name of another node"},
       {"a later node", [](Json& n) { n[2]["args"][0] = Ref("neg"); },
        "nodes[2] (mul) refers to neg, which is not an earlier node"},
       {"itself", [](Json& n) { n[2]["args"][0] = Ref("mul"); },
        "nodes[2] (mul) refers to mul, which is not an earlier node"},
       {"a number as reference",
        [](Json& n) {
          n[2]["args"][0] = {{"ref", 0}};
        },
        "nodes[2] (mul) has a reference that names no node"},
       {"args", [](Json& n) { n[2]["args"] = 1; },
        "nodes[2] (mul) has args that are not a list"},
       {"kwargs", [](Json& n) { n[2]["kwargs"] = Json::array(); },
        "nodes[2] (mul) has kwargs that are not an object"},
       {"an object of two keys",
        [](Json& n) {
          n[2]["args"][0] = {{"ref", "weights"}, {"x", 1}};
        },
        "nodes[2] (mul) has an argument that is an object of not one key"},
       {"an unknown tag",
        [](Json& n) {
          n[2]["args"][0] = {{"code", "x"}};
        },
        "nodes[2] (mul) has the argument {\\\"code\\\":\\\"x\\\"}, which is "
        "not offered"},
       {"a slice of two",
        [](Json& n) {
          n[2]["args"][0] = {{"slice", {1, 2}}};
        },
        "nodes[2] (mul) has the argument {\\\"slice\\\":[1,2]}"},
       {"half precision",
        [](Json& n) {
          n[3]["kwargs"] = {{"dtype", {{"dtype", "float16"}}}};
        },
        "nodes[3] (sum_1) has the argument {\\\"dtype\\\":\\\"float16\\\"}"},
       {"a GPU",
        [](Json& n) {
          n[3]["args"].push_back({{"device", "cuda"}});
        },
        "nodes[3] (sum_1) has the argument {\\\"device\\\":\\\"cuda\\\"}"},
       {"a float",
        [](Json& n) {
          n[3]["args"].push_back({{"float", "1e9"}});
        },
        "nodes[3] (sum_1) has a float that is not inf, -inf or nan"},
       {"2^63", [](Json& n) { n[3]["args"].push_back(uint64_t{1} << 63); },
        "nodes[3] (sum_1) has an argument above 2^63"},
       {"a dict",
        [](Json& n) {
          n[3]["args"][0] = {{"dict", Json::object()}};
        },
        "nodes[3] (sum_1) has the argument {\\\"dict\\\":{}}"},
       {"too few inputs", [](Json& n) { n.erase(1); },
        "nodes[1] (mul) must be the placeholder of the input weights"},
       {"too many inputs",
        [](Json& n) { n.insert(n.begin() + 2, Node("placeholder", "p", "p")); },
        "nodes[2] (p) is placeholder 3, but loss.custom_loss.inputs has 2"},
       {"inputs in another order", [](Json& n) { std::swap(n[0], n[1]); },
        "nodes[0] (weights) has the target weights, must be logprobs"},
       {"a default", [](Json& n) { n[1]["args"] = {0.5}; },
        "nodes[1] (weights) has arguments, must be an input without a "
        "default"}});
}

TEST(LossGraphTest, RefusesBadOutputs) {
  const auto result = [](Json& n) -> Json& { return n[5]["args"][0]["tuple"]; };
  const std::string form =
      "nodes[5] (output) must return (loss, metrics): a tensor, and a dict of "
      "tensors";
  ExpectBad(
      {{"no output", [](Json& n) { n.erase(5); },
        "nodes[4] (neg) is the last node, must be the output"},
       {"an early output", [](Json& n) { n.push_back(n[4]); },
        "nodes[5] (output) is an output, must be the last node"},
       {"two results", [](Json& n) { n[5]["args"].push_back(1); }, form},
       {"a bare loss",
        [](Json& n) { n[5]["args"] = Json::array({Ref("neg")}); }, form},
       {"three parts", [=](Json& n) { result(n).push_back(1); }, form},
       {"metrics in a list", [=](Json& n) { result(n)[1] = Json::array(); },
        form},
       {"a number as loss", [=](Json& n) { result(n)[0] = 0; },
        "nodes[5] (output) has a reference that names no node"},
       {"a loss of the inputs", [=](Json& n) { result(n)[0] = Ref("weights"); },
        "nodes[5] (output) returns a loss that does not depend on logprobs"},
       {"a number as metric",
        [=](Json& n) { result(n)[1]["dict"]["custom/x:sum"] = 1; },
        "nodes[5] (output) has a reference that names no node"},
       {"a metric of the server",
        [=](Json& n) { result(n)[1]["dict"]["loss:sum"] = Ref("neg"); },
        "nodes[5] (output) returns the metric \"loss:sum\", must be custom/"},
       {"another reduction",
        [=](Json& n) { result(n)[1]["dict"]["custom/x:max"] = Ref("neg"); },
        "nodes[5] (output) returns the metric \"custom/x:max\""},
       {"a metric without a name",
        [=](Json& n) { result(n)[1]["dict"]["custom/:sum"] = Ref("neg"); },
        "nodes[5] (output) returns the metric \"custom/:sum\""},
       {"a metric in capitals",
        [=](Json& n) { result(n)[1]["dict"]["custom/X:sum"] = Ref("neg"); },
        "nodes[5] (output) returns the metric \"custom/X:sum\""}});
}

TEST(LossGraphTest, RefusesBadTexts) {
  const auto error = [](const std::string& graph) {
    CustomLoss loss = Loss(GoodNodes());
    loss.graph = graph;
    return std::string(ReadLossGraph(loss).status().message());
  };
  const std::string path = "loss.custom_loss.graph";
  EXPECT_EQ(error(""), path + " is not a JSON object");
  EXPECT_EQ(error("[]"), path + " is not a JSON object");
  EXPECT_EQ(error("{\"nodes\": \"\xff\"}"), path + " is not a JSON object");
  EXPECT_EQ(error("{\"format\": 2, \"nodes\": []}"),
            path + ".format must be 1");
  EXPECT_EQ(error("{}"), path + ".nodes must be a list");
  EXPECT_EQ(error("{\"nodes\": []}"),
            path + ".nodes has 0 nodes, must be in [1, 512]");
  EXPECT_EQ(error("{\"nodes\": " + Json(std::vector<int>(513)).dump() + "}"),
            path + ".nodes has 513 nodes, must be in [1, 512]");
  EXPECT_EQ(error(std::string(kMaxGraphBytes + 1, ' ')),
            path + " has 131073 bytes, must have at most 131072");
  EXPECT_EQ(error("{\"nodes\": " + std::string(60'000, '[') + "}"),
            path + " is nested deeper than 24");
}

TEST(LossGraphTest, RefusesBadInputs) {
  const auto error = [](const std::vector<CustomLossInput>& inputs) {
    CustomLoss loss = Loss(GoodNodes());
    loss.inputs = inputs;
    return std::string(ReadLossGraph(loss).status().message());
  };
  const std::string path = "loss.custom_loss.inputs";
  EXPECT_EQ(error({}),
            path + " has 0 inputs, must be in [1, 16], logprobs included");
  EXPECT_THAT(error(std::vector<CustomLossInput>(17)),
              ::testing::StartsWith(path + " has 17 inputs"));
  EXPECT_EQ(error({{"weights", 1}}),
            path +
                "[0].name is weights, must be logprobs for the first input "
                "alone");
  EXPECT_EQ(error({{"logprobs", 1}, {"logprobs", 1}}),
            path +
                "[1].name is logprobs, must be logprobs for the first input "
                "alone");
  EXPECT_EQ(error({{"logprobs", 1}, {"a", 1}, {"a", 1}}),
            path + "[2].name is a again");
  EXPECT_THAT(
      error({{"logprobs", 1}, {"A", 1}}),
      ::testing::StartsWith(path + "[1].name is \"A\", must be 1 to 64"));
  EXPECT_EQ(error({{"logprobs", 0}}),
            path + "[0].rank is 0, must be in [1, 2]");
  EXPECT_EQ(error({{"logprobs", 1}, {"a", 3}}),
            path + "[1].rank is 3, must be in [0, 2]");
}

TEST(LossGraphTest, FindsOperationsOfEveryModule) {
  const auto name = [](bool is_method, const char* target) {
    const FoundOperation found = FindLossOperation(is_method, target);
    return found.operation == nullptr ? "" : std::string(found.operation->name);
  };
  EXPECT_EQ(name(false, "torch.exp"), "exp");
  EXPECT_EQ(name(false, "torch.Tensor.exp"), "exp");
  EXPECT_EQ(name(false, "torch.nn.functional.softmax"), "softmax");
  EXPECT_EQ(name(false, "torch._C._nn.log_sigmoid"), "log_sigmoid");
  EXPECT_EQ(name(false, "operator.truediv"), "div");
  EXPECT_EQ(name(false, "operator.and_"), "bitwise_and");
  EXPECT_EQ(name(false, "math.fabs"), "abs");
  EXPECT_TRUE(FindLossOperation(false, "math.sqrt").of_math);
  EXPECT_EQ(name(false, "getattr"), "getattr");
  EXPECT_EQ(name(true, "clamp"), "clamp");
  EXPECT_EQ(name(true, "torch.exp"), "");
  EXPECT_EQ(name(false, "exp"), "");
  EXPECT_EQ(name(false, "torch.os.exp"), "");
}

}  // namespace
}  // namespace weft
