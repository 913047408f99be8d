#include "tests/support/host_device/function_name.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <vector>

namespace weft::testing {
namespace {

std::string ReadFile(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
std::vector<T> Table(const std::string& bytes, uint64_t offset, uint64_t size) {
  std::vector<T> table(size / sizeof(T));
  std::memcpy(table.data(), bytes.data() + offset, table.size() * sizeof(T));
  return table;
}

// Maps each function's address in the program's file to its mangled name. Reads
// the file's symbol table, because dladdr knows only exported names.
std::map<uint64_t, std::string> ReadFunctions() {
  std::map<uint64_t, std::string> functions;
  const std::string bytes = ReadFile("/proc/self/exe");
  const auto header = Table<Elf64_Ehdr>(bytes, 0, sizeof(Elf64_Ehdr)).front();
  const auto sections = Table<Elf64_Shdr>(bytes, header.e_shoff,
                                          header.e_shnum * sizeof(Elf64_Shdr));
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_SYMTAB) continue;
    const uint64_t names = sections[section.sh_link].sh_offset;
    for (const Elf64_Sym& symbol :
         Table<Elf64_Sym>(bytes, section.sh_offset, section.sh_size)) {
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC) continue;
      functions.emplace(symbol.st_value, bytes.data() + names + symbol.st_name);
    }
  }
  return functions;
}

// Subtracts the load address of a position-independent program.
uint64_t AddressInFile(const void* function) {
  Dl_info info;
  const auto address = reinterpret_cast<uint64_t>(function);
  if (dladdr(function, &info) == 0) return address;
  const auto* header = static_cast<const Elf64_Ehdr*>(info.dli_fbase);
  return header->e_type == ET_DYN
             ? address - reinterpret_cast<uint64_t>(info.dli_fbase)
             : address;
}

// Turns "void a::b<c, 1>(d)" into "b<c, 1>".
std::string Shorten(const std::string& name) {
  size_t end = 0, begin = 0;
  int depth = 0;
  const std::string anonymous = "(anonymous namespace)";
  for (; end < name.size(); ++end) {
    if (name.compare(end, anonymous.size(), anonymous) == 0) {
      end += anonymous.size() - 1;
      continue;
    }
    if (name[end] == '(' && depth == 0) break;
    depth += name[end] == '<' ? 1 : name[end] == '>' ? -1 : 0;
    if (depth == 0 && (name[end] == ' ' || name[end] == ':')) begin = end + 1;
  }
  return name.substr(begin, end - begin);
}

}  // namespace

std::string FunctionName(const void* function) {
  static const std::map<uint64_t, std::string> functions = ReadFunctions();
  const auto found = functions.find(AddressInFile(function));
  if (found == functions.end()) {
    std::ostringstream address;
    address << function;
    return address.str();
  }
  int status = 0;
  char* demangled =
      abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status);
  const std::string name = status == 0 ? demangled : found->second;
  std::free(demangled);
  return Shorten(name);
}

}  // namespace weft::testing
