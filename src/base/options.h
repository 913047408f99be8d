// The values that an operator can set, with default, unit and range.
// server/flags.cc fills these structs from the flags, their environment
// variables and the file of --config.
#ifndef WEFT_SRC_BASE_OPTIONS_H_
#define WEFT_SRC_BASE_OPTIONS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/base/choices.h"
#include "src/base/log.h"

namespace weft {

// --max-resident-adapters=0 means this many adapters, or fewer if a CUDA device
// has no memory for them.
inline constexpr int kDefaultResidentAdapters = 64;

// The model that the engine runs, and the engine's limits.
struct EngineOptions {
  std::string model_dir;  // Hugging Face folder; required.
  // Folder of adapter checkpoints, created if missing.
  std::string checkpoint_dir = "checkpoints";
  // Bytes to keep free. If the disk of `checkpoint_dir` has fewer, saves are
  // refused. If the disk of `state_dir` has fewer, new work is refused. 0: no
  // reserve.
  int64_t disk_reserve_bytes = int64_t{512} << 20;
  // Folder for the log of steps, for snapshots of the adapters and for the
  // ledger of the Tinker API. A restarted server continues from this folder. An
  // adapter's Durability says how much of the adapter the folder holds. Empty:
  // a restart loses everything that is not in a checkpoint.
  std::string state_dir;
  bool accept_base_model_change = false;  // Takes state of another model.
  // A snapshot is written when the log has grown by snapshot_log_bytes since
  // the last snapshot, or when a replay would take snapshot_replay_seconds.
  int64_t snapshot_log_bytes = int64_t{1} << 30;
  int snapshot_replay_seconds = 120;
  Device device = Device::kAuto;
  Dtype dtype = Dtype::kAuto;
  CpuBf16 cpu_bf16 = CpuBf16::kAuto;
  BaseWeights base_weights = BaseWeights::kDtype;
  LoadFormat load_format = LoadFormat::kAuto;
  int tensor_parallel_size = 1;  // Ranks that share every layer, [1, 64].
  int data_parallel_size = 1;    // Replicas that share the data, [1, 64].
  int expert_parallel_size = 1;  // Groups that divide the experts, [1, 64].
  // Compute threads of a rank on the CPU. 0: an equal share of all cores, and
  // decoding uses fewer while other processes are busy.
  int num_threads = 0;
  int max_adapters = 1024;          // [1, 100000]
  int max_adapters_per_tenant = 0;  // [0, max_adapters]; 0: max_adapters.
  // A tenant whose adapters hold at least this many bytes gets no new adapter.
  // 0: no limit.
  int64_t max_adapter_bytes_per_tenant = 0;
  // Most adapters on the device at a time, [0, 100000]. 0: 64, or fewer if a
  // CUDA device has no memory for 64.
  int max_resident_adapters = 0;
  // Host bytes for adapters that leave the device. Adapters that do not fit
  // move to disk. -1: none. 0: none on a CPU; chosen at startup on CUDA.
  int64_t adapter_host_bytes = 0;
  int max_rank = 128;              // [1, 1024]
  int max_context_tokens = 0;      // At most the model's limit; 0: that limit.
  int64_t max_batch_tokens = 0;    // Micro-batch tokens. 0: depends on device.
  int64_t loss_chunk_size = 1024;  // Rows of logits per chunk; 0, -1: all.
  GradientCheckpointing gradient_checkpointing = GradientCheckpointing::kAuto;
  int64_t memory_budget_bytes = 0;  // For a micro-batch's activations; 0: auto.
  // Share of a CUDA device's memory that weftd may use; [0.05, 1].
  double device_memory_share = 0.9;
  bool share_prompts = true;           // Compute equal prefixes once.
  int64_t max_queue_requests = 1024;   // Requests that may wait; >= 1.
  int64_t max_queue_tokens = 4 << 20;  // Tokens of waiting requests; >= 1.
  // Like the two limits above, but for each tenant. 0: the same value as above.
  int64_t max_queue_requests_per_tenant = 0;
  int64_t max_queue_tokens_per_tenant = 0;
  int max_calls_per_tenant = 0;  // A copy of the same field of ServerOptions.
  // Bytes of stored replies, for all adapters. A repeated step gets its stored
  // reply. The oldest replies are dropped first.
  int64_t max_stored_reply_bytes = int64_t{256} << 20;
  std::string tenant_weights;     // In the format of ParseTenantWeights.
  int64_t kv_cache_bytes = 0;     // 0: 1 GiB on a CPU; set at startup on CUDA.
  int max_decode_sequences = 64;  // Most sequences in a decode iteration.
  bool decode_graphs = true;      // Run decode steps as CUDA graphs.
  // Share of device time for sampling while training waits, [0.01, 0.99].
  double sampling_share = 0.5;

  // Returns INVALID_ARGUMENT with one line for each problem. The line names the
  // flag.
  [[nodiscard]] absl::Status Validate() const;
};

// The name under which metrics count all tenants that --tenant-weights does not
// name.
inline constexpr char kOtherTenants[] = "other";

// Reads the tenants' weights from "NAME=WEIGHT,...", each in [1, 1000]. A
// tenant without an entry has weight 1. Errors: INVALID_ARGUMENT, which names
// the entry. kOtherTenants is not a valid name.
[[nodiscard]] absl::StatusOr<std::map<std::string, int64_t>> ParseTenantWeights(
    absl::string_view text);

// What the server listens on and accepts.
struct ServerOptions {
  std::string listen = "127.0.0.1:50051";         // Or "unix:PATH".
  std::string metrics_listen = "127.0.0.1:9400";  // Empty: no metrics endpoint.
  std::string tinker_listen;                      // Empty: no Tinker API.
  std::string port_file;   // When weftd listens, it writes its addresses to
                           // this file, one per line.
  std::string model_name;  // Empty: the last part of the model folder.
  // Further names that the Tinker API accepts for the base model.
  std::vector<std::string> model_aliases;
  std::string torch_dir;  // Empty: the LibTorch that weftd was linked with.
  // Names besides localhost and addresses that HTTP clients use for this
  // server.
  std::vector<std::string> allowed_hosts;
  // Limit for each API. 0: a third of the files that the process may open, at
  // most 10000.
  int max_connections = 0;
  int64_t max_message_bytes = 64 << 20;  // [1 KiB, 2 GiB)
  int64_t max_import_bytes = 2LL << 30;  // Sum over open imports and uploads.
  int max_data_per_request = 4096;
  int64_t max_tokens_per_request = 1 << 20;
  int max_samples = 256;
  int drain_timeout_seconds = 120;
  // Permits addresses other than loopback, because no stranger reaches them.
  bool trusted_network = false;
  // File with one JSON token record per line (src/base/token_file.h), read
  // again when it changes. Empty: no client needs a token.
  std::string auth_tokens_file;
  // The next two limits need --auth-tokens-file. 0: no limit.
  int max_calls_per_tenant = 0;
  int64_t max_tokens_per_second_per_tenant = 0;
  LogStyle log_style = LogStyle::kAuto;
  LogLevel log_level = LogLevel::kInfo;
  // Copies of the same fields of EngineOptions, for the Tinker API.
  std::string state_dir;
  std::string checkpoint_dir;

  // Validates like EngineOptions::Validate. gRPC and the Tinker API listen
  // beyond loopback only with --trusted-network and without tokens, because
  // they speak plaintext and gRPC 1.51 can be ended by whoever connects to it.
  // With tokens, gRPC needs a Unix socket, or the host 127.0.0.1, ::1 or
  // localhost.
  [[nodiscard]] absl::Status Validate() const;
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_OPTIONS_H_
