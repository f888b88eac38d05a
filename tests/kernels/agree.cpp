// Attends to pages that another program gives, and writes the partial results.
//
//   agree DTYPE WIDTH MODULE COMMON
//
// Reads, all little endian: the 12 numbers of Header, q, the position of each query, the pages with
// addresses as offsets, the splits, and the bytes that the offsets are of. Writes o, m and l.
#include "runner.h"

namespace {

template <class T>
std::vector<T> read_all(size_t count) {
    std::vector<T> values(count);
    if (std::fread(values.data(), sizeof(T), count, stdin) != count) shim::fail("short input");
    return values;
}

void write_all(const std::vector<float>& values) {
    if (std::fwrite(values.data(), sizeof(float), values.size(), stdout) != values.size()) {
        shim::fail("cannot write");
    }
}

struct Header {
    kvfs::Heads heads;
    uint32_t window, masked, pages, splits, bytes;
    float scale, soft_cap;
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 5) shim::fail("agree DTYPE WIDTH MODULE COMMON");
    const cases::Kernels kernels = {cases::stored(arguments[1]),
                                    static_cast<unsigned>(std::atoi(arguments[2])),
                                    cases::Module(arguments[3]), cases::Module(arguments[4])};
    const Header header = read_all<Header>(1)[0];
    const kvfs::Heads& heads = header.heads;
    cases::Question question;
    question.q = read_all<float>(size_t{heads.num_queries} * heads.num_qo_heads() * heads.head_dim);
    question.positions = read_all<kvfs::i64>(heads.num_queries);
    question.masked = header.masked;
    question.window = header.window;
    question.scale = header.scale;
    question.soft_cap = header.soft_cap;
    question.shifts = {0};
    cases::Random random(1);
    cases::Cache cache(kernels.stored, heads, {}, cases::Layout::Tail, random);
    cache.pages = read_all<kvfs::Page>(header.pages);
    const auto splits = read_all<kvfs::Split>(header.splits);
    const cases::Memory memory(header.bytes);
    const auto bytes = read_all<uint8_t>(header.bytes);
    std::memcpy(memory.bytes.get(), bytes.data(), bytes.size());
    for (kvfs::Page& page : cache.pages) {
        page.k = memory.bytes.get() + reinterpret_cast<uintptr_t>(page.k);
        page.v = memory.bytes.get() + reinterpret_cast<uintptr_t>(page.v);
    }
    const cases::Runner runner(kernels, cache, question, splits, 1);
    const cases::Partials merged = runner.merge(runner.attend({8, question.masked}));
    write_all(merged.o);
    write_all(merged.m);
    write_all(merged.l);
    return 0;
}
