#include "server/flag_table.h"

#include <type_traits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/flag_values.h"

namespace weft {
namespace {

// Makes a row. `field` returns a reference to the flag's value in Settings.
template <typename Field>
Flag MakeFlag(const char* group, std::string name, Field field,
              std::string help, std::string value_name = "") {
  Settings defaults;
  auto& value = field(defaults);
  using T = std::remove_reference_t<decltype(value)>;
  Flag flag;
  flag.group = group;
  flag.name = std::move(name);
  flag.value_name = value_name.empty() ? FlagValueName(value) : value_name;
  flag.help = std::move(help);
  flag.is_bool = std::is_same_v<T, bool>;
  flag.is_list = std::is_same_v<T, std::vector<std::string>>;
  flag.default_value = ShowFlagValue(value);
  flag.read = [field](absl::string_view text, Settings* settings) {
    return ReadFlagValue(text, &field(*settings));
  };
  flag.show = [field](Settings settings) {
    return ShowFlagValue(field(settings));
  };
  flag.is_number = std::is_arithmetic_v<T> && !flag.is_bool;
  return flag;
}

#define WEFT_ENGINE(member) \
  [](Settings & s) -> auto& { return s.engine.member; }
#define WEFT_SERVER(member) \
  [](Settings & s) -> auto& { return s.server.member; }

std::vector<Flag> ModelFlags() {
  static constexpr char kGroup[] = "Model and device";
  return {
      MakeFlag(kGroup, "model", WEFT_ENGINE(model_dir),
               "Hugging Face folder of the base model. Required.", "DIR"),
      MakeFlag(kGroup, "model-name", WEFT_SERVER(model_name),
               "Name shown to clients. Empty: last part of --model.", "NAME"),
      MakeFlag(kGroup, "model-alias", WEFT_SERVER(model_aliases),
               "Further names of the base model for the Tinker API.",
               "NAME,..."),
      MakeFlag(kGroup, "device", WEFT_ENGINE(device),
               "Where to compute. auto: CUDA when there is a device."),
      MakeFlag(kGroup, "dtype", WEFT_ENGINE(dtype),
               "Type of the base weights. auto: bf16 on CUDA, f32 on a CPU."),
      MakeFlag(
          kGroup, "cpu-bf16", WEFT_ENGINE(cpu_bf16),
          "Arithmetic of a CPU with --dtype bf16. auto: bf16 products with f32 "
          "sums if it has AVX512_BF16, except for the few rows of a decode "
          "step. off: f32; then log-probabilities of samples are those of "
          "training within 1e-4."),
      MakeFlag(kGroup, "weights", WEFT_ENGINE(base_weights),
               "How the base model's matrices are held, its embedding and head "
               "included. dtype: as --dtype says. int8: in 8 bits, with a "
               "scale for every 64 inputs; products stay in f32 on a CPU and "
               "in bf16 on CUDA."),
      MakeFlag(kGroup, "load-format", WEFT_ENGINE(load_format),
               "auto: safetensors or .bin files of --model. dummy: seeded "
               "random weights from its config.json alone."),
      MakeFlag(kGroup, "tensor-parallel-size",
               WEFT_ENGINE(tensor_parallel_size),
               "Processes that share every layer, one CUDA device each, "
               "[1, 64]."),
      MakeFlag(kGroup, "data-parallel-size", WEFT_ENGINE(data_parallel_size),
               "Groups of such processes, each with the whole model, that "
               "share the data of a training micro-batch, [1, 64]."),
      MakeFlag(kGroup, "expert-parallel-size",
               WEFT_ENGINE(expert_parallel_size),
               "Groups among which the experts of a layer are dealt out, "
               "[1, 64]. It divides --tensor-parallel-size: the processes of "
               "a group split its experts' features."),
      MakeFlag(kGroup, "threads", WEFT_ENGINE(num_threads),
               "Compute threads of a process on the CPU, [0, 4096]. 0: its "
               "share of the cores that affinity and quota allow; decoding "
               "then uses fewer while other processes are busy."),
      MakeFlag(kGroup, "torch-dir", WEFT_SERVER(torch_dir),
               "Folder of the torch package whose libraries are used. Empty: "
               "lib/weft/torch of an installed weftd, or where it was built.",
               "DIR"),
      MakeFlag(kGroup, "max-context", WEFT_ENGINE(max_context_tokens),
               "Longest sequence in tokens. 0: the model's limit."),
  };
}

std::vector<Flag> AdapterFlags() {
  static constexpr char kGroup[] = "Adapters";
  return {
      MakeFlag(kGroup, "checkpoint-dir", WEFT_ENGINE(checkpoint_dir),
               "Folder of checkpoints; created when missing.", "DIR"),
      MakeFlag(kGroup, "state-dir", WEFT_ENGINE(state_dir),
               "Folder of the log of all steps and of snapshots; created when "
               "missing. A step is on disk before its answer, and a start goes "
               "on from there. Empty: a restart keeps only checkpoints.",
               "DIR"),
      MakeFlag(kGroup, "accept-base-model-change",
               WEFT_ENGINE(accept_base_model_change),
               "Take state and checkpoints of another base model."),
      MakeFlag(kGroup, "disk-reserve-bytes", WEFT_ENGINE(disk_reserve_bytes),
               "Free bytes below which saves (on the disk of checkpoints) and "
               "new work (on that of the log) are refused. 0: no reserve.",
               "BYTES"),
      MakeFlag(kGroup, "snapshot-log-bytes", WEFT_ENGINE(snapshot_log_bytes),
               "A snapshot cuts the log when it has grown by so much.",
               "BYTES"),
      MakeFlag(kGroup, "snapshot-replay-seconds",
               WEFT_ENGINE(snapshot_replay_seconds),
               "The same when running the log again would take so long, "
               "[1, 86400]."),
      MakeFlag(kGroup, "max-adapters", WEFT_ENGINE(max_adapters),
               "Adapters at a time, wherever their tensors are, [1, 100000]."),
      MakeFlag(kGroup, "max-adapters-per-tenant",
               WEFT_ENGINE(max_adapters_per_tenant),
               "Adapters of one tenant, at most --max-adapters. 0: as many."),
      MakeFlag(kGroup, "max-adapter-bytes-per-tenant",
               WEFT_ENGINE(max_adapter_bytes_per_tenant),
               "A tenant whose adapters hold so much, with optimizer state, "
               "gets no new one. 0: no limit.",
               "BYTES"),
      MakeFlag(kGroup, "max-resident-adapters",
               WEFT_ENGINE(max_resident_adapters),
               "Adapters on the device at a time, [0, 100000]; the others "
               "wait in host memory or in a folder .spill of "
               "--checkpoint-dir. 0: 64, or on CUDA as many of 64 as fit."),
      MakeFlag(kGroup, "adapter-host-bytes", WEFT_ENGINE(adapter_host_bytes),
               "Host memory for adapters that are not on the device; beyond "
               "it they go to disk. 0: none on the CPU, on CUDA a quarter of "
               "what is free at the start. -1: none.",
               "BYTES"),
      MakeFlag(kGroup, "max-rank", WEFT_ENGINE(max_rank),
               "Largest LoRA rank, [1, 1024]."),
      MakeFlag(
          kGroup, "max-import-bytes", WEFT_SERVER(max_import_bytes),
          "Bytes that all imports and uploads under way may hold together.",
          "BYTES"),
  };
}

constexpr char kWorkGroup[] = "Training and sampling";

std::vector<Flag> BatchFlags() {
  return {
      MakeFlag(kWorkGroup, "max-batch-tokens", WEFT_ENGINE(max_batch_tokens),
               "Tokens of a micro-batch. 0: 2048 on the CPU; on CUDA 4096 to "
               "16384, the most that need no layer recomputed, or less on "
               "small devices.",
               "TOKENS"),
      MakeFlag(kWorkGroup, "loss-chunk-size", WEFT_ENGINE(loss_chunk_size),
               "Rows of logits alive at a time, at least -1. 0 or -1: all.",
               "ROWS"),
      MakeFlag(kWorkGroup, "gradient-checkpointing",
               WEFT_ENGINE(gradient_checkpointing),
               "Layers that keep their input alone and run again in the "
               "backward pass: none, all, or as few as --memory-budget asks."),
      MakeFlag(
          kWorkGroup, "memory-budget", WEFT_ENGINE(memory_budget_bytes),
          "Memory for the activations of a micro-batch. 0: on the CPU half of "
          "what is free at the start; on CUDA all that weights, adapters, "
          "key/value cache and decode graphs leave.",
          "BYTES"),
      MakeFlag(kWorkGroup, "device-memory-share",
               WEFT_ENGINE(device_memory_share),
               "Share of a CUDA device's memory that a process may take, "
               "[0.05, 1].",
               "SHARE"),
      MakeFlag(kWorkGroup, "share-prompts", WEFT_ENGINE(share_prompts),
               "Run once what sequences of an adapter begin with in common."),
  };
}

std::vector<Flag> QueueFlags() {
  return {
      MakeFlag(kWorkGroup, "max-queue-requests",
               WEFT_ENGINE(max_queue_requests),
               "Waiting requests before new ones are refused, >= 1."),
      MakeFlag(kWorkGroup, "max-queue-tokens", WEFT_ENGINE(max_queue_tokens),
               "Tokens of waiting requests, of samples those of the prompt, "
               "before new ones are refused, >= 1.",
               "TOKENS"),
      MakeFlag(kWorkGroup, "max-queue-requests-per-tenant",
               WEFT_ENGINE(max_queue_requests_per_tenant),
               "The same for the requests of one tenant, at most "
               "--max-queue-requests. 0: that."),
      MakeFlag(kWorkGroup, "max-queue-tokens-per-tenant",
               WEFT_ENGINE(max_queue_tokens_per_tenant),
               "The same for their tokens, at most --max-queue-tokens. 0: "
               "that.",
               "TOKENS"),
      MakeFlag(kWorkGroup, "max-stored-reply-bytes",
               WEFT_ENGINE(max_stored_reply_bytes),
               "Memory for the replies that a repeated step gets again, of all "
               "adapters; the oldest go first, the latest one stays.",
               "BYTES"),
      MakeFlag(kWorkGroup, "tenant-weights", WEFT_ENGINE(tenant_weights),
               "Shares of tenants in training and sampling, [1, 1000]; 1 for "
               "those not named. Metrics tell the named ones apart.",
               "NAME=WEIGHT,..."),
  };
}

std::vector<Flag> SamplingFlags() {
  return {
      MakeFlag(kWorkGroup, "kv-cache-bytes", WEFT_ENGINE(kv_cache_bytes),
               "Memory of the key/value cache. 0: 1 GiB on the CPU; on CUDA "
               "enough for --max-decode-sequences of 2048 tokens each, or for "
               "one sequence of --max-context.",
               "BYTES"),
      MakeFlag(kWorkGroup, "max-decode-sequences",
               WEFT_ENGINE(max_decode_sequences),
               "Sequences in one decode iteration, [1, 4096]."),
      MakeFlag(kWorkGroup, "decode-graphs", WEFT_ENGINE(decode_graphs),
               "Run decode iterations on CUDA as graphs, recorded when a size "
               "of batch is first met: one launch instead of hundreds."),
      MakeFlag(kWorkGroup, "sampling-share", WEFT_ENGINE(sampling_share),
               "Share of device time for sampling when training waits too, "
               "[0.01, 0.99].",
               "SHARE"),
  };
}

std::vector<Flag> ServerFlags() {
  static constexpr char kGroup[] = "Server";
  return {
      MakeFlag(
          kGroup, "listen", WEFT_SERVER(listen),
          "Address of the gRPC server, in plaintext, or unix:PATH. Port 0: "
          "any free port. Strangers reach it through the edge "
          "(deploy/edge), which speaks TLS.",
          "HOST:PORT"),
      MakeFlag(kGroup, "metrics-listen", WEFT_SERVER(metrics_listen),
               "Address of the Prometheus page /metrics, of /livez and /readyz "
               "for probes, and of /authorize for the edge. Empty: none.",
               "HOST:PORT"),
      MakeFlag(kGroup, "tinker-listen", WEFT_SERVER(tinker_listen),
               "Address of the Tinker API, in plaintext. Empty: none.",
               "HOST:PORT"),
      MakeFlag(kGroup, "port-file", WEFT_SERVER(port_file),
               "File to write the addresses to once listening: gRPC, then "
               "metrics, then the Tinker API if it is on, one per line.",
               "PATH"),
      MakeFlag(kGroup, "max-connections", WEFT_SERVER(max_connections),
               "Open connections of clients, of gRPC and of the Tinker API "
               "each, [0, 1048576]. A tenant has at most half of the latter. "
               "0: a third of the open files that the "
               "system grants, at most 10000."),
      MakeFlag(kGroup, "max-message-bytes", WEFT_SERVER(max_message_bytes),
               "Largest message a client may send, [1 KiB, 2 GiB).", "BYTES"),
      MakeFlag(kGroup, "max-data-per-request",
               WEFT_SERVER(max_data_per_request),
               "Sequences of one training request, [1, 1048576]."),
      MakeFlag(kGroup, "max-tokens-per-request",
               WEFT_SERVER(max_tokens_per_request),
               "Tokens of all its sequences, >= 1.", "TOKENS"),
      MakeFlag(kGroup, "max-samples", WEFT_SERVER(max_samples),
               "Samples of one prompt, [1, 65536]."),
      MakeFlag(
          kGroup, "drain-timeout-seconds", WEFT_SERVER(drain_timeout_seconds),
          "How long SIGTERM waits for accepted work, [0, 86400].", "SECONDS"),
  };
}

std::vector<Flag> SecurityFlags() {
  static constexpr char kGroup[] = "Security";
  return {
      MakeFlag(kGroup, "auth-tokens-file", WEFT_SERVER(auth_tokens_file),
               "Tokens, of which every call needs one, as weftctl token create "
               "writes them; with tenant, scopes and expiry. A replaced file "
               "is used within a second. Empty: everybody may do everything.",
               "FILE"),
      MakeFlag(kGroup, "max-calls-per-tenant",
               WEFT_SERVER(max_calls_per_tenant),
               "Calls of one tenant under way, with tokens, [0, 1048576]. 0: "
               "no limit."),
      MakeFlag(kGroup, "max-tokens-per-second-per-tenant",
               WEFT_SERVER(max_tokens_per_second_per_tenant),
               "Tokens to train on or to sample that one tenant may ask for, "
               "with tokens of access, averaged over ten seconds. 0: no limit.",
               "TOKENS"),
      MakeFlag(kGroup, "trusted-network", WEFT_SERVER(trusted_network),
               "Allow addresses beyond loopback, without tokens: no stranger "
               "reaches them. Whoever connects to gRPC can end the process."),
      MakeFlag(kGroup, "allowed-hosts", WEFT_SERVER(allowed_hosts),
               "Names of this server, besides localhost and addresses, that "
               "HTTP clients send as Host. Others are refused, so that no page "
               "of a stranger reaches the server through a browser.",
               "NAME,..."),
  };
}

std::vector<Flag> OtherFlags() {
  static constexpr char kGroup[] = "Logs and actions";
  std::vector<Flag> flags = {
      MakeFlag(kGroup, "log-format", WEFT_SERVER(log_style),
               "auto: text on a terminal, JSON lines otherwise."),
      MakeFlag(kGroup, "log-level", WEFT_SERVER(log_level),
               "Least important lines to write."),
      MakeFlag(
          kGroup, "config", [](Settings & s) -> auto& { return s.config_file; },
          "File of settings: a JSON object of flags without their dashes, in "
          "which lines may be comments (//). Empty: none.",
          "FILE"),
      MakeFlag(
          kGroup, "print-config",
          [](Settings & s) -> auto& { return s.print_config; },
          "Print all settings, and where each is from, as a file for "
          "--config, and exit."),
      MakeFlag(
          kGroup, "check-config",
          [](Settings & s) -> auto& { return s.check_config; },
          "Check the configuration and exit: 0 good, 2 bad. With "
          "--device-memory-bytes it also reads config.json and the headers of "
          "--model, and prints how a CUDA device's memory would be shared "
          "out; 1 when a start would fail."),
      MakeFlag(
          kGroup, "device-memory-bytes",
          [](Settings & s) -> auto& { return s.device_memory_bytes; },
          "For --check-config: memory of each CUDA device. No device is "
          "needed.",
          "BYTES"),
      MakeFlag(
          kGroup, "version", [](Settings & s) -> auto& { return s.version; },
          "Print the version and exit."),
      MakeFlag(
          kGroup, "help", [](Settings & s) -> auto& { return s.help; },
          "Print this text and exit."),
  };
  for (Flag& flag : flags) {
    flag.is_action = flag.is_bool || flag.name == "device-memory-bytes";
  }
  return flags;
}

#undef WEFT_ENGINE
#undef WEFT_SERVER

}  // namespace

std::string Flag::environment() const {
  if (is_action) return "";
  return absl::StrCat(
      "WEFT_", absl::AsciiStrToUpper(absl::StrReplaceAll(name, {{"-", "_"}})));
}

const std::vector<Flag>& FlagTable() {
  static const std::vector<Flag>& table = *[] {
    auto* const flags = new std::vector<Flag>;
    for (auto make : {ModelFlags, AdapterFlags, BatchFlags, QueueFlags,
                      SamplingFlags, ServerFlags, SecurityFlags, OtherFlags}) {
      for (Flag& flag : make()) flags->push_back(std::move(flag));
    }
    return flags;
  }();
  return table;
}

}  // namespace weft
