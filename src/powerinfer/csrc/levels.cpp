#include "levels.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "cpu.h"

// What CMakeLists.txt compiled: PI_PARTS is PI_PART(file, level) for every source file of kernels and every level that it
// was compiled for, PI_BASES is PI_BASE(level, the one that it builds upon, or nothing).
#define PI_PART(file, level) extern "C" void pi_##file##_##level(PiKernels*);
PI_PARTS
#undef PI_PART

namespace {

struct Part {
  const char* level;
  void (*enter)(PiKernels*);
};
#define PI_PART(file, level) {#level, pi_##file##_##level},
const Part PARTS[] = {PI_PARTS};
#undef PI_PART

// The level whose kernels a level has where it enters none.
#define PI_BASE(level, base) {#level, #base},
const std::map<std::string, std::string> BASES = {PI_BASES};
#undef PI_BASE

bool is_built(const std::string& level) { return BASES.count(level) > 0; }

void enter(const std::string& level, PiKernels* to) {
  const std::string& base = BASES.at(level);
  if (!base.empty()) enter(base, to);
  for (const Part& part : PARTS)
    if (level == part.level) part.enter(to);
}

std::map<std::string, PiKernels> tables() {
  std::map<std::string, PiKernels> all;
  for (const std::string& level : cpu_levels()) {
    if (!is_built(level)) continue;
    PiKernels& to = all[level];
    enter(level, &to);  // runs code of the level, so only where the CPU has it
    to.name = BASES.find(level)->first.c_str();
  }
  return all;
}

std::string listed(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

}  // namespace

std::vector<const PiKernels*> supported_levels() {
  static const std::map<std::string, PiKernels> all = tables();
  std::vector<const PiKernels*> levels;
  for (const std::string& level : cpu_levels())
    if (all.count(level)) levels.push_back(&all.at(level));
  return levels;
}

std::vector<std::string> levels_not_built() {
  std::vector<std::string> names = cpu_levels();
  names.erase(std::remove_if(names.begin(), names.end(), is_built), names.end());
  return names;
}

const PiKernels* find_level(const std::string& name) {
  std::vector<std::string> known;
  for (const PiKernels* level : supported_levels()) {
    if (name.empty() || name == level->name) return level;
    known.push_back(level->name);
  }
  const std::vector<std::string> missing = levels_not_built();
  if (std::find(missing.begin(), missing.end(), name) != missing.end())
    throw std::invalid_argument("instruction set '" + name + "' is not in this build, which has: " + listed(known) +
                                "; `make install LEVELS=all` in a clone of the repository, or `pip install .` there, " +
                                "builds all of them");
  throw std::invalid_argument("instruction set '" + name +
                              "' is unknown or cannot run on this CPU; choose one of: " + listed(known));
}
