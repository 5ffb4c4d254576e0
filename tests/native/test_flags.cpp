// Flags between the CPU and a GPU, in whose place a thread asks and waits: memory that both use without atomics is written
// and read in turn, and a GPU that is not answered goes on. tests/test_flags.py has the calls.
#include "host_flags.h"

#include <chrono>
#include <thread>

#include "checks.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Numbers {
  alignas(128) uint32_t asked = 7;
  alignas(128) uint32_t answered = 7;
};

// What a GPU's stream does.
void ask(Numbers& numbers, uint32_t number) { __atomic_store_n(&numbers.asked, number, __ATOMIC_RELEASE); }
void wait_for(const Numbers& numbers, uint32_t number) {
  while ((int32_t)(__atomic_load_n(&numbers.answered, __ATOMIC_ACQUIRE) - number) < 0) std::this_thread::yield();
}

void test_turns() {
  Check check("each answer is of what was asked with its number");
  Numbers numbers;
  HostFlags flags(&numbers.asked, &numbers.answered, 60);
  const uint32_t steps = 50, calls = 20;
  uint64_t input = 0, result = 0;  // no atomics: whoever has the turn has them
  for (uint32_t step = 0; step < steps; step++) {
    flags.begin();
    std::thread gpu([&] {
      for (uint32_t number = 2; number < 2 + 3 * calls; number += 3) {
        input = step * 1000 + number;
        ask(numbers, number);
        wait_for(numbers, number);
        check.yes(result == input * input, number);
      }
    });
    for (uint32_t number = 2; number < 2 + 3 * calls; number += 3) {
      while (!flags.wait(number, 0.01)) {}
      result = input * input;
      flags.answer(number);
    }
    gpu.join();
    check.yes(!flags.is_released(), step);
  }
}

void test_watchdog() {
  Check check("a GPU that is not answered waits for as long as it should, and no other one");
  Numbers numbers;
  HostFlags flags(&numbers.asked, &numbers.answered, 0.1);
  for (int round = 0; round < 3; round++) {
    flags.begin();
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    check.yes(!flags.is_released(), round);
    const Clock::time_point begin = Clock::now();
    std::thread gpu([&] {
      ask(numbers, 3);
      wait_for(numbers, 3);
      wait_for(numbers, 5);
    });
    gpu.join();
    check.yes(flags.is_released() && seconds_since(begin) > 0.08, round);
    flags.answer(3);
    check.yes(flags.is_released(), round);
  }
}

void test_own_answers() {
  Check check("what a GPU answers itself is answered, but not once it was released");
  Numbers numbers;
  HostFlags flags(&numbers.asked, &numbers.answered, 60);
  for (int round = 0; round < 3; round++) {
    flags.begin();
    __atomic_store_n(&numbers.answered, 3, __ATOMIC_RELEASE);
    check.yes(flags.is_answered(3) && flags.is_answered(2) && !flags.is_answered(4), round);
    flags.release();
    std::thread gpu([&] {
      for (uint32_t number = 4; number < 8; number++) {
        __atomic_store_n(&numbers.answered, number, __ATOMIC_RELEASE);
        wait_for(numbers, 100);  // for ever, if that were an end of it
      }
    });
    gpu.join();
    check.yes(flags.is_released(), round);
  }
}

void test_end() {
  Check check("whoever is asked nothing waits for so long; a watchdog ends with its flags");
  const Clock::time_point begin = Clock::now();
  for (int round = 0; round < 10; round++) {
    Numbers numbers;
    HostFlags flags(&numbers.asked, &numbers.answered, 3600);
    check.yes(!flags.wait(1, 0) && !flags.wait(1, 0.01), round);
    if (round % 2) flags.release();
    check.yes(flags.is_released() == (round % 2 == 1), round);
  }
  check.yes(seconds_since(begin) < 60, 0);
}

}  // namespace

int main() {
  test_turns();
  test_watchdog();
  test_own_answers();
  test_end();
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
