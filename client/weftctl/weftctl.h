// Runs weftctl, which calls a server's operations from a shell.
#ifndef WEFT_CLIENT_WEFTCTL_WEFTCTL_H_
#define WEFT_CLIENT_WEFTCTL_WEFTCTL_H_

#include <ostream>
#include <string>
#include <vector>

namespace weft::client::weftctl {

// `out` gets the results of a command, `err` its messages.
struct Streams {
  std::ostream& out;
  std::ostream& err;
};

// Runs one command line (without the program's name). Returns the exit code: 0
// if done, 1 if the command failed, 2 if the command line is wrong.
int RunWeftctl(const std::vector<std::string>& given, const Streams& streams);

}  // namespace weft::client::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_WEFTCTL_H_
