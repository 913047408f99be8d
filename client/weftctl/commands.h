// The commands of weftctl. Each *Commands function returns the commands of one
// source file.
#ifndef WEFT_CLIENT_WEFTCTL_COMMANDS_H_
#define WEFT_CLIENT_WEFTCTL_COMMANDS_H_

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/weft_client.h"
#include "client/weftctl/arguments.h"

namespace weft::client::weftctl {

// The client, arguments and streams with which a command runs.
struct Session {
  Client& client;
  const Arguments& arguments;
  std::ostream& out;
  std::ostream& err;
  // Opens a client of another server, with the flags of the command line.
  std::function<absl::StatusOr<std::unique_ptr<Client>>(
      const std::string& address)>
      connect;
  bool json = false;
};

struct Command {
  std::string name;  // One or two words, such as "adapters create".
  std::string help;
  std::function<absl::Status(const Session&)> run;
  std::vector<std::string> words;
  std::vector<FlagSpec> flags;
  bool last_word_optional = false;
  // The command uses files, or finds its servers itself.
  bool offline = false;
  // The command shows what the server does, or that it does not answer. So its
  // calls are short and are not repeated.
  bool view = false;
};

// Returns the flag --timeout of a view.
inline FlagSpec ViewTimeout() {
  return {"timeout", "DURATION", "time for each call", "1s"};
}

// Returns the flag --tenant, which names the tenant of a new adapter.
inline FlagSpec TenantFlag() {
  return {"tenant", "NAME", "tenant of a new adapter; one of its own", ""};
}

// Returns the flag --durability, the durability of a new adapter.
inline FlagSpec DurabilityFlag() {
  return {"durability", "D",
          "what of a new adapter survives: memory (nothing), step", ""};
}

// Reads --durability. Without the flag, the server chooses the durability.
// Errors: UsageError.
absl::StatusOr<v1::Durability> ReadDurability(const Arguments& arguments);

std::vector<Command> ServerCommands();
std::vector<Command> TokenCommands();
std::vector<Command> AdapterCommands();
std::vector<Command> CheckpointCommands();
std::vector<Command> SampleCommands();
std::vector<Command> WeightsCommands();
std::vector<Command> StateCommands();
std::vector<Command> FleetCommands();
std::vector<Command> BalanceCommands();

}  // namespace weft::client::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_COMMANDS_H_
