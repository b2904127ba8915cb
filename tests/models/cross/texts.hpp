// Texts of a tiny decoder: with drafts, in batches and alone, they are those of plain decoding.
#pragma once

#include <algorithm>

#include "decoder.hpp"
#include "sampling.hpp"

// Chooses tokens: the likeliest, or at temperature 1 the winner of the race that the sequence and the position seed.
class Chooser {
   public:
    explicit Chooser(const Library& library)
        : distribute(library.of<int32_t(const float*, int64_t, int64_t, int64_t, const Filter*, Distribution*, int)>("foretoken_distributions")),
          all(library.of<int32_t(const float*, int64_t, int64_t, int64_t, const Distribution*, float*, int)>("foretoken_rows")),
          winner(library.of<int32_t(const void*, int, int64_t, uint64_t, int64_t*, int)>("foretoken_race")) {}

    int operator()(const float* logits, int count, bool sampled, int sequence, int position) const {
        if (!sampled) return (int)(std::max_element(logits, logits + count) - logits);
        const Filter filter = {1.0f, -INFINITY, 0, 1.0f};
        Distribution distribution;
        std::vector<float> p(count);
        distribute(logits, count, 1, count, &filter, &distribution, 1), all(logits, count, 1, count, &distribution, p.data(), 1);
        int64_t token = -1;
        winner(p.data(), 0, count, (uint64_t)(sequence * 1000 + position) * 0x9E3779B97F4A7C15u, &token, 1);
        return (int)token;
    }

   private:
    int32_t (*distribute)(const float*, int64_t, int64_t, int64_t, const Filter*, Distribution*, int);
    int32_t (*all)(const float*, int64_t, int64_t, int64_t, const Distribution*, float*, int);
    int32_t (*winner)(const void*, int, int64_t, uint64_t, int64_t*, int);
};

using Tokens = std::vector<int>;

// A draft: tokens, and the node that each follows; -1: the text so far.
struct Nodes {
    Tokens tokens, parents;
    int add(int token, int parent) {
        tokens.push_back(token), parents.push_back(parent);
        return (int)tokens.size() - 1;
    }
};

// How the next tokens are drafted from the text that plain decoding wrote, of which a third is drafted wrong.
enum class Shape { NONE, CHAIN, TREE };

inline Nodes draft(Shape shape, const Tokens& plain, size_t at, int vocabulary, Random& random) {
    Nodes nodes;
    for (int depth = 0, parent = -1; shape != Shape::NONE && depth < 4 && at + depth < plain.size(); depth++) {
        const int right = plain[at + depth], wrong = (right + 1 + random.below(vocabulary - 1)) % vocabulary;
        const bool is_right = random.below(3);
        const int first = nodes.add(is_right && shape == Shape::CHAIN ? right : wrong, parent);
        parent = shape == Shape::TREE ? nodes.add(is_right ? right : (wrong + 1) % vocabulary, parent) : first;
    }
    return nodes;
}

// Completes sequences together, each with a draft of its own in every pass.
template <class Decoder>
class Completion {
   public:
    Completion(Decoder& decoder, const Chooser& choose, bool sampled) : decoder(decoder), choose(choose), sampled(sampled) {}

    // ids: what seeds each text; plain: the texts that drafts are made of.
    std::vector<Tokens> operator()(const std::vector<int>& ids, std::vector<Tokens> texts, size_t length, Shape shape,
                                   const std::vector<Tokens>& plain) {
        Random random{8};
        std::vector<typename Decoder::Pages> pages;
        std::vector<size_t> cached(texts.size());
        for (size_t i = 0; i < texts.size(); i++) pages.push_back(decoder.pages());
        for (;;) {
            std::vector<size_t> going;
            std::vector<Nodes> drafts;
            std::vector<const typename Decoder::Pages*> of;
            std::vector<int32_t> from{0};
            std::vector<typename Decoder::Row> rows;
            for (size_t i = 0; i < texts.size(); i++) {
                if (texts[i].size() >= length) continue;
                going.push_back(i), of.push_back(&pages[i]);
                drafts.push_back(draft(shape, shape == Shape::NONE ? texts[i] : plain[i], texts[i].size(), Decoder::VOCAB, random));
                add_rows(texts[i], cached[i], drafts.back(), rows);
                from.push_back((int32_t)rows.size());
            }
            if (going.empty()) return texts;
            const std::vector<float> logits = decoder.run(of, from, rows, 1 + (int)going.size() % 2);
            for (size_t i = 0; i < going.size(); i++) {
                Tokens& text = texts[going[i]];
                const int root = from[i + 1] - (int)drafts[i].tokens.size() - 1;
                cached[going[i]] = text.size();
                cached[going[i]] += accept(text, ids[going[i]], drafts[i], &logits[root * Decoder::VOCAB], pages[going[i]]);
                if (text.size() > length) text.resize(length);
            }
        }
    }

   private:
    Decoder& decoder;
    const Chooser& choose;
    const bool sampled;

    // The tokens that are not computed yet, and the nodes behind them.
    static void add_rows(const Tokens& text, size_t cached, const Nodes& nodes, std::vector<typename Decoder::Row>& rows) {
        const int count = (int)text.size();
        for (int at = (int)cached; at < count; at++) rows.push_back({text[at], at, at, at + 1});
        const size_t first = rows.size();
        for (size_t node = 0; node < nodes.tokens.size(); node++) {
            const int parent = nodes.parents[node], place = count + (int)node;
            typename Decoder::Row row{nodes.tokens[node], count, place, count};
            if (parent >= 0) row.position = rows[first + parent].position + 1, row.branches = rows[first + parent].branches;
            row.branches.push_back(place);
            rows.push_back(row);
        }
    }

    // Appends the accepted tokens and the next one. Returns the number of accepted ones; their cache rows follow the text's.
    size_t accept(Tokens& text, int id, const Nodes& nodes, const float* logits, const typename Decoder::Pages& pages) {
        const int count = (int)text.size();
        std::vector<int32_t> places;
        for (int at = -1;;) {
            text.push_back(choose(logits + (at + 1) * Decoder::VOCAB, Decoder::VOCAB, sampled, id, (int)text.size()));
            int next = -1;
            for (size_t node = 0; node < nodes.tokens.size() && next < 0; node++)
                if (nodes.parents[node] == at && nodes.tokens[node] == text.back()) next = (int)node;
            if (next < 0) break;
            places.push_back(count + next), at = next;
        }
        if (!places.empty()) decoder.move(pages, count, places);
        return places.size();
    }
};

template <Kind kind, Kind cache = kind, int weights = kind>
void check_texts(const Packing& packing, const Library& library, const Library& sampling) {
    using Decoder = TinyDecoder<kind, cache, weights>;
    constexpr int COUNT = 4, LENGTH = 20;
    const char* const formats[] = {"float32", "bfloat16", "int8", "12 bits", "four bits"};  // by kind
    const std::string name = std::string("texts with weights in ") + formats[weights] + ", cache in " + formats[cache];
    Decoder decoder(packing, library);
    const Chooser choose(sampling);
    Random random{9};
    std::vector<int> ids;
    std::vector<Tokens> prompts(COUNT);
    for (int i = 0; i < COUNT; i++) {
        ids.push_back(i);
        for (int at = 0; at < 5 + i; at++) prompts[i].push_back(random.below(Decoder::VOCAB));
    }
    int equal = 0, all = 0;
    for (bool sampled : {false, true}) {
        Completion<Decoder> complete(decoder, choose, sampled);
        std::vector<Tokens> plain;
        for (int i = 0; i < COUNT; i++) plain.push_back(complete({i}, {prompts[i]}, LENGTH, Shape::NONE, {})[0]);
        for (const Tokens& text : plain) report(name, text);
        for (Shape shape : {Shape::NONE, Shape::CHAIN, Shape::TREE}) {
            const std::vector<Tokens> together = complete(ids, prompts, LENGTH, shape, plain);
            for (int i = 0; i < COUNT; i++, all += 2) {
                equal += together[i] == plain[i];
                equal += complete({i}, {prompts[i]}, LENGTH, shape, {plain[i]})[0] == plain[i];
            }
        }
    }
    check(equal == all, name, ": ", equal, " of ", all, " are those of plain decoding");
    std::printf("%s: %d of %d are those of plain decoding\n", name.c_str(), equal, all);
}
