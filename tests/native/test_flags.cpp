// Flags between the CPU and a GPU, in whose place a thread asks and waits: memory that both use without atomics is written
// and read in turn, and a GPU that is not answered goes on. Calls compute with a pool, whose caller is the one who answers
// them: a thread, or who takes them back from it. tests/test_flags.py has those of a model.
#include "host_flags.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "answering_thread.h"
#include "checks.h"
#include "host_calls.h"
#include "pool.h"

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

// In a process of its own, before this one has threads.
void test_stopped_program() {
  Check check("the time for which a program is stopped is not that of a CPU that does not answer");
  const pid_t child = fork();
  if (child == 0) {
    Numbers numbers;
    HostFlags flags(&numbers.asked, &numbers.answered, 1.0);
    ask(numbers, 1);
    raise(SIGSTOP);
    _exit(flags.is_released());
  }
  int status = 0;
  check.yes(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  kill(child, SIGCONT);
  check.yes(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, 1);
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

// result = 3 * input, by all threads of a pool.
struct TripleCall : HostCall {
  TripleCall(std::shared_ptr<HostCalls> all, Pool& pool) : HostCall(std::move(all)), pool(pool) {}
  ~TripleCall() override {
    pool.between_jobs([] {});  // a thread that is late may have this
  }
  bool compute() override {
    pool.run_phases([] {},
                    [this](int) {
                      pool.phase(N, 1, [this](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; i++) result[i] = 3 * input[i];
                      });
                    },
                    nullptr);
    return true;
  }
  static constexpr int64_t N = 16;
  Pool& pool;
  uint64_t input[N] = {}, result[N] = {};
};

// Of a recording; the GPU asks for each once the one before is answered, with another input.
struct Step {
  explicit Step(Pool& pool) : flags(std::make_shared<HostFlags>(&numbers.asked, &numbers.answered, 60)) {
    calls = std::make_shared<FlaggedCalls>(flags);
    for (uint32_t number = 2; number < 2 + 3 * COUNT; number += 3) {
      all.push_back(std::make_shared<TripleCall>(shared, pool));
      calls->add(number, all.back());
    }
  }
  void begin() {
    flags->begin();
    calls->begin();
  }
  void play(Check& check, uint64_t seed) {
    uint32_t number = 2;
    for (const auto& call : all) {
      for (int64_t i = 0; i < TripleCall::N; i++) call->input[i] = seed + number + (uint64_t)i;
      ask(numbers, number);
      wait_for(numbers, number);
      for (int64_t i = 0; i < TripleCall::N; i++) check.yes(call->result[i] == 3 * call->input[i], number);
      number += 3;
    }
  }
  static constexpr uint32_t COUNT = 10;
  Numbers numbers;
  std::shared_ptr<HostFlags> flags;
  std::shared_ptr<HostCalls> shared = std::make_shared<HostCalls>();
  std::shared_ptr<FlaggedCalls> calls;
  std::vector<std::shared_ptr<TripleCall>> all;
};

void test_thread() {
  Check check("a thread answers every call while the caller does nothing");
  Pool pool(2);
  Step step(pool);
  AnsweringThread thread;
  for (uint64_t round = 0; round < 50; round++) {
    step.begin();
    thread.start(step.calls, 60);
    std::thread gpu([&] { step.play(check, round); });
    gpu.join();
    thread.take_back();
    check.yes(step.calls->answer(0) && step.shared->made() == (int64_t)(round + 1) * Step::COUNT, (int64_t)round);
  }
}

void test_take_back() {
  Check check("calls are taken back at any moment, and the pool with them");
  Pool pool(2);
  Step step(pool);
  AnsweringThread thread;
  Random random(1);
  for (uint64_t round = 0; round < 50; round++) {
    step.begin();
    thread.start(step.calls, 60);
    std::thread gpu([&] { step.play(check, round); });
    for (uint32_t pauses = random.next() % 20000; pauses > 0; pauses--) cpu_relax();
    thread.take_back();
    const bool taken = !thread.answers();
    uint64_t sum = 0;  // what the caller computes with the pool before it answers the rest
    pool.run([&](int) { pool.phase(8, 8, [&](int64_t, int64_t) { sum++; }); });
    while (!step.calls->answer(0.01)) {}
    gpu.join();
    check.yes(taken && sum == 1, (int64_t)round);
    check.yes(step.shared->made() == (int64_t)(round + 1) * Step::COUNT, (int64_t)round);
  }
}

void test_end_of_thread() {
  Check check("a thread ends while it waits, while it computes, and after it was told to begin");
  Pool pool(2);
  Step step(pool);
  const Clock::time_point begin = Clock::now();
  for (int64_t round = 0; round < 20; round++) {
    step.begin();
    AnsweringThread thread;
    if (round % 4) thread.start(step.calls, round % 4 == 3 ? 0.001 : 3600);
    if (round % 2) ask(step.numbers, 2);
    if (round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  check.yes(seconds_since(begin) < 60 && step.shared->made() <= 20, 0);
}

}  // namespace

int main() {
  test_stopped_program();
  test_turns();
  test_watchdog();
  test_own_answers();
  test_end();
  test_thread();
  test_take_back();
  test_end_of_thread();
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
