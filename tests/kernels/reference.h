// Attention by its definition, in f64. Pages that moved have their K rotated here, where the
// kernels rotate q.
#pragma once

#include <algorithm>

#include "cache.h"

namespace cases {

// A rotary position encoding of the elements from `first` on.
struct Rotation {
    unsigned pairs = 0, first = 0;
    bool interleaved = false;

    double frequency(unsigned pair) const { return std::pow(10000.0, -1.0 * pair / pairs); }

    void rotate(double* row, double positions) const {
        for (unsigned pair = 0; pair < pairs; ++pair) {
            const unsigned a = first + (interleaved ? 2 * pair : pair);
            const unsigned b = a + (interleaved ? 1 : pairs);
            const double angle = positions * frequency(pair), x = row[a], y = row[b];
            row[a] = x * std::cos(angle) - y * std::sin(angle);
            row[b] = x * std::sin(angle) + y * std::cos(angle);
        }
    }
};

// What is asked of the kernels, besides the heads and the pages.
struct Question {
    // [num_queries, num_qo_heads, head_dim]
    std::vector<float> q;
    std::vector<kvfs::i64> positions;
    bool masked = false;
    unsigned window = 0;
    double scale = 1, soft_cap = 0;
    Rotation rotation;
    // Distances by which pages moved, one for each copy of the queries.
    std::vector<int> shifts;
    // [num_qo_heads]
    std::vector<float> sinks;
};

struct Answer {
    // [num_queries, num_qo_heads, v_head_dim], normalised
    std::vector<double> out;
    // The same with sinks.
    std::vector<double> out_with_sinks;
    // [num_queries, num_qo_heads]; the largest logit, and the sum of exp(logit - it)
    std::vector<double> m, l;
    // [tokens]
    std::vector<double> mass;
};

class Reference {
public:
    Reference(const Cache& cache, const Question& question)
        : cache_(cache), question_(question), heads_(cache.heads), k_(cache.k) {
        for (const kvfs::Page& page : cache.pages) {
            for (size_t at = page.index * heads_.num_kv_heads;
                 at < (page.index + size_t{page.tokens}) * heads_.num_kv_heads; ++at) {
                question.rotation.rotate(&k_[at * heads_.head_dim],
                                         question.shifts[page.queries]);
            }
        }
    }

    // The logit of a token before the soft cap.
    double product(unsigned query, unsigned head, size_t token) const {
        const unsigned dim = heads_.head_dim;
        const float* q = &question_.q[(query * heads_.num_qo_heads() + head) * dim];
        const double* k = &k_[(token * heads_.num_kv_heads + head / heads_.group) * dim];
        double sum = 0;
        for (unsigned i = 0; i < dim; ++i) sum += q[i] * k[i];
        return sum * question_.scale;
    }

    Answer answer() const {
        Answer answer;
        answer.mass.resize(cache_.positions.size());
        for (unsigned query = 0; query < heads_.num_queries; ++query) {
            for (unsigned head = 0; head < heads_.num_qo_heads(); ++head) row(query, head, answer);
        }
        return answer;
    }

private:
    const Cache& cache_;
    const Question& question_;
    const kvfs::Heads heads_;
    std::vector<double> k_;

    bool sees(unsigned query, size_t token) const {
        const kvfs::i64 distance = question_.positions[query] - cache_.positions[token];
        if (!question_.masked) return true;
        return distance >= 0 && (question_.window == 0 || distance < question_.window);
    }

    void row(unsigned query, unsigned head, Answer& answer) const {
        const unsigned dim = heads_.v_head_dim;
        std::vector<double> logits(cache_.positions.size());
        double top = kvfs::EMPTY_M;
        for (size_t token = 0; token < logits.size(); ++token) {
            const double cap = question_.soft_cap, product = this->product(query, head, token);
            logits[token] = cap != 0 ? cap * std::tanh(product / cap) : product;
            if (sees(query, token)) top = std::max(top, logits[token]);
        }
        double sum = 0;
        std::vector<double> out(dim);
        for (size_t token = 0; token < logits.size(); ++token) {
            if (!sees(query, token)) continue;
            logits[token] = std::exp(logits[token] - top);
            sum += logits[token];
            const double* v = &cache_.v[(token * heads_.num_kv_heads + head / heads_.group) * dim];
            for (unsigned i = 0; i < dim; ++i) out[i] += logits[token] * v[i];
        }
        const double sink = std::exp(question_.sinks[head] - top);
        for (double o : out) {
            answer.out.push_back(sum > 0 ? o / sum : 0);
            // Without tokens there is no `top` to be relative to, and o is 0.
            answer.out_with_sinks.push_back(sum > 0 ? o / (sum + sink) : 0);
        }
        for (size_t token = 0; token < logits.size() && sum > 0; ++token) {
            if (sees(query, token)) answer.mass[token] += logits[token] / sum;
        }
        answer.m.push_back(top);
        answer.l.push_back(sum);
    }
};

}  // namespace cases
