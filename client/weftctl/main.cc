#include <iostream>
#include <string>
#include <vector>

#include "client/weftctl/weftctl.h"

int main(int argc, char** argv) {
  const std::vector<std::string> given(argv + 1, argv + argc);
  return weft::client::weftctl::RunWeftctl(
      given, {.out = std::cout, .err = std::cerr});
}
