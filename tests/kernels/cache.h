// K and V with seeded contents: stored as the kernels read them, and as numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "arguments.h"

namespace cases {

typedef std::mt19937_64 Random;
typedef std::vector<uint8_t> Bytes;

inline double uniform(Random& random, double from, double to) {
    return std::uniform_real_distribution<double>(from, to)(random);
}

inline unsigned below(Random& random, unsigned end) { return random() % end; }

inline float normal(Random& random) { return std::normal_distribution<float>(0, 1)(random); }

template <class T>
void append(Bytes& bytes, T value) {
    uint8_t raw[sizeof(T)];
    std::memcpy(raw, &value, sizeof(T));
    bytes.insert(bytes.end(), raw, raw + sizeof(T));
}

template <class T>
T at(const uint8_t* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof(T));
    return value;
}

// What a dtype's rows look like, written from the formats and not from the kernels.
struct Stored {
    const char* name;
    // Elements and bytes of a block.
    unsigned elements, bytes;
    // Adds a random block of an ordinary size.
    void (*write)(Random& random, Bytes& row);
    // What an element of a block is worth.
    double (*value)(const uint8_t* block, unsigned element);

    unsigned row_bytes(unsigned count) const { return count / elements * bytes; }

    double element(const uint8_t* row, unsigned index) const {
        return value(row + index / elements * bytes, index % elements);
    }
};

inline double f8_value(const uint8_t* block, unsigned) {
    const int exponent = *block >> 3 & 15, mantissa = *block & 7;
    if (exponent == 15 && mantissa == 7) return std::nan("");
    const double size = exponent == 0 ? std::ldexp(mantissa, -9)
                                      : std::ldexp(8 + mantissa, exponent - 10);
    return *block & 0x80 ? -size : size;
}

// A scale, and so many random bytes.
template <unsigned BYTES, int DIVISOR>
void write_block(Random& random, Bytes& row) {
    append(row, static_cast<_Float16>(normal(random) / DIVISOR));
    for (unsigned i = 0; i < BYTES; ++i) append<uint8_t>(row, random());
}

const Stored FORMATS[] = {
    {"f32", 1, 4, [](Random& random, Bytes& row) { append(row, normal(random)); },
     [](const uint8_t* block, unsigned) -> double { return at<float>(block); }},
    {"f16", 1, 2,
     [](Random& random, Bytes& row) { append(row, static_cast<_Float16>(normal(random))); },
     [](const uint8_t* block, unsigned) { return static_cast<double>(at<_Float16>(block)); }},
    {"bf16", 1, 2,
     [](Random& random, Bytes& row) {
         append(row, static_cast<uint16_t>(shim::bits<uint32_t>(normal(random)) >> 16));
     },
     [](const uint8_t* block, unsigned) -> double {
         return shim::bits<float>(static_cast<uint32_t>(at<uint16_t>(block)) << 16);
     }},
    // Up to 1.9 with all exponents below, subnormals included.
    {"f8_e4m3", 1, 1,
     [](Random& random, Bytes& row) { append<uint8_t>(row, random() & 0xbf); }, f8_value},
    {"q8_0", 32, 34, write_block<32, 70>,
     [](const uint8_t* block, unsigned element) {
         return static_cast<double>(at<_Float16>(block)) * at<int8_t>(block + 2 + element);
     }},
    {"q4_0", 32, 18, write_block<16, 5>,
     [](const uint8_t* block, unsigned element) {
         const unsigned byte = block[2 + element % 16];
         const int nibble = element < 16 ? byte & 15 : byte >> 4;
         return static_cast<double>(at<_Float16>(block)) * (nibble - 8);
     }},
};

inline const Stored& stored(const std::string& name) {
    for (const Stored& format : FORMATS) {
        if (name == format.name) return format;
    }
    shim::fail("an unknown dtype");
}

// Where rows lie in a page.
enum class Layout { HeadMajor, TokenMajor, Tail };

// Memory of exactly so many bytes, aligned as pages are.
struct Memory {
    std::unique_ptr<uint8_t[], void (*)(void*)> bytes;

    explicit Memory(size_t size)
        : bytes(static_cast<uint8_t*>(std::aligned_alloc(16, (size + 15) / 16 * 16)), std::free) {
        // What lies between the rows is no number: nobody may look.
        std::memset(bytes.get(), 0xff, size);
    }
};

// Pages of one layer.
struct Cache {
    const Stored& stored;
    kvfs::Heads heads;
    std::vector<kvfs::Page> pages;
    std::vector<Memory> memory;
    // [tokens, num_kv_heads, head_dim] and [tokens, num_kv_heads, v_head_dim]
    std::vector<double> k, v;
    // Of each token.
    std::vector<kvfs::i64> positions;

    Cache(const Stored& stored, const kvfs::Heads& heads, const std::vector<unsigned>& tokens,
          Layout layout, Random& random)
        : stored(stored), heads(heads) {
        kvfs::i64 position = 0;
        for (unsigned count : tokens) {
            add_page(count, position, layout, random);
            position += count;
        }
    }

    void add_page(unsigned tokens, kvfs::i64 position, Layout layout, Random& random) {
        const unsigned k_row = stored.row_bytes(heads.head_dim);
        const unsigned v_row = stored.row_bytes(heads.v_head_dim), count = heads.num_kv_heads;
        kvfs::Page page = {};
        page.tokens = tokens;
        page.position = position;
        page.index = positions.size();
        if (layout == Layout::HeadMajor) {
            page.k_head_stride = tokens * k_row, page.k_token_stride = k_row;
            page.v_head_stride = tokens * v_row, page.v_token_stride = v_row;
        } else {
            page.k_head_stride = k_row, page.v_head_stride = v_row;
            const bool tail = layout == Layout::Tail;
            page.k_token_stride = count * (tail ? k_row + v_row : k_row);
            page.v_token_stride = count * (tail ? k_row + v_row : v_row);
        }
        const size_t k_bytes = size_t{tokens} * count * k_row, v_bytes = size_t{tokens} * count * v_row;
        if (layout == Layout::Tail) {
            memory.emplace_back(k_bytes + v_bytes);
            page.k = memory.back().bytes.get();
            page.v = page.k + count * k_row;
        } else {
            memory.emplace_back(k_bytes);
            page.k = memory.back().bytes.get();
            memory.emplace_back(v_bytes);
            page.v = memory.back().bytes.get();
        }
        for (unsigned token = 0; token < tokens; ++token) {
            positions.push_back(position + token);
            for (unsigned head = 0; head < count; ++head) {
                write(page.k + size_t{head} * page.k_head_stride +
                          size_t{token} * page.k_token_stride,
                      heads.head_dim, random, k);
                write(page.v + size_t{head} * page.v_head_stride +
                          size_t{token} * page.v_token_stride,
                      heads.v_head_dim, random, v);
            }
        }
        pages.push_back(page);
    }

    void write(const uint8_t* to, unsigned elements, Random& random,
               std::vector<double>& values) const {
        Bytes row;
        while (row.size() < stored.row_bytes(elements)) stored.write(random, row);
        std::memcpy(const_cast<uint8_t*>(to), row.data(), row.size());
        for (unsigned i = 0; i < elements; ++i) {
            values.push_back(stored.element(row.data(), i));
        }
    }
};

}  // namespace cases
