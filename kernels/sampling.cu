// What is asked of rows of logits: the sum of exponentials, the logits of single tokens, the greatest ones, and draws.
// All of it equals what the host does with the same logits (src/sampling), bit for bit; logarithms are the host's.

#include "sampling.cuh"

/// Exponentials that wait in shared memory for the sixteen lanes that sum them; a multiple of 16.
constexpr u32 EXPS = 4096;
/// Pieces of a row whose weights are added up, at most.
constexpr u32 MOST_PIECES = 1024;
constexpr u32 NO_TOKEN = 0xffffffff;

/// A change of a token's logit.
struct LogitChange {
    u32 token;
    /// A bias, as the bits of a float, or how often the completion has the token.
    u32 value;
};

/// What is asked of one row; as src/device/cuda/sampling.rs writes it. Each row is in one query at most.
struct SamplingQuery {
    u32 row;
    /// Whose logit is wanted, or `NO_TOKEN`.
    u32 token;
    /// How many of the greatest logits are wanted.
    u32 top;
    /// Draws, and where their random numbers begin.
    u32 draws, first_random;
    /// Whether the tokens that can be drawn are wanted.
    u32 kept;
    /// 0: the greatest is drawn. Else tokens with scaled logits from `least_scaled` on, of them the first `top_k` (0:
    /// all), of them the first with `top_p` of the weight can be drawn.
    float temperature, least_scaled, top_p;
    u32 top_k;
    /// What changes before the draws: where it begins, and how many changes there are of each kind, one kind after
    /// another. Tokens are in the vocabulary.
    u32 first_change;
    /// Whether only those listed are allowed.
    u32 restricted, allowed;
    u32 banned;
    /// Sorted by token, which may come more than once.
    u32 biased;
    /// Tokens that are penalised, each once.
    u32 seen;
    float repetition, frequency, presence;
    /// Where the answer begins, in words: `SamplingAnswer`, then the draws, each a `SamplingDraw`, then the greatest
    /// logits in no particular order, each a token and its logit, then a bit for each token that can be drawn.
    u32 answer;
};

/// What comes first in an answer.
struct SamplingAnswer {
    /// 0 if the logits are not a distribution: there is nothing else then.
    u32 sound;
    float greatest, exps, token_logit;
    u32 top;
    /// 0 if the changes left no token: there are no draws then.
    u32 possible;
    /// Of the logits after the changes.
    float greatest_changed;
    u32 weight_low, weight_high;
};

/// A token, its logit, and what that was changed to.
struct SamplingDraw {
    u32 token;
    float logit, changed;
};

/// `sum(exp(logit - greatest))`, element `i` by lane `i % 16`, then in a fixed tree, as the CPU device's `log_sum_exp`.
/// One warp adds while the others compute what comes next. At least two warps; `exps` has room for two times `EXPS`.
__device__ __forceinline__ float sum_of_exps(const LogitRow& row, float greatest, float* exps) {
    const u32 tiles = ceil_div(row.vocab, EXPS);
    float sum = 0.0f;
    for (u32 tile = 0; tile <= tiles; tile++) {
        if (threadIdx.x >= WARP_LANES && tile < tiles) {
            const u32 count = min(row.vocab - tile * EXPS, EXPS);
            const float* from = row.logits + tile * EXPS;
            float* to = exps + tile % 2 * EXPS;
            for (u32 i = threadIdx.x - WARP_LANES; i < count; i += blockDim.x - WARP_LANES) {
                to[i] = exp_f32(from[i] - greatest);
            }
        } else if (threadIdx.x < WARP_LANES && tile > 0) {
            const u32 count = min(row.vocab - (tile - 1) * EXPS, EXPS);
            const float* from = exps + (tile - 1) % 2 * EXPS;
#pragma unroll 16
            for (u32 i = threadIdx.x % 16; i < count; i += 16) sum += from[i];
        }
        __syncthreads();
    }
    if (threadIdx.x < WARP_LANES) {
        sum = sum_of_16(sum);
        if (threadIdx.x == 0) *exps = sum;
    }
    __syncthreads();
    sum = *exps;
    __syncthreads();
    return sum;
}

/// Keeps a finite logit finite and a ruled-out token ruled out.
__device__ __forceinline__ float saturate_logit(float before, float after) {
    constexpr float MOST = 3.40282347e38f;
    if (before == -INFINITY) return before;
    return after < -MOST ? -MOST : after > MOST ? MOST : after;
}

/// As src/sampling/processors.rs.
__device__ __forceinline__ float penalise(const SamplingQuery& query, float logit, u32 generated) {
    float repeated = logit > 0.0f ? logit / query.repetition : logit * query.repetition;
    repeated = saturate_logit(logit, repeated);
    if (generated == 0) return repeated;
    return saturate_logit(repeated, repeated - query.frequency * float(generated) - query.presence);
}

__device__ __forceinline__ u32 count_changes(const SamplingQuery& query) {
    return query.allowed + query.banned + query.biased + query.seen;
}

/// Applies a row's changes in place, each kind after the one before, and keeps what was there in `saved`.
__device__ __forceinline__ void change_logits(const LogitRow& row, const SamplingQuery& query,
                                              const LogitChange* changes, float* saved) {
    const u32 all = count_changes(query);
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) saved[i] = row.logits[changes[i].token];
    __syncthreads();
    if (query.restricted) {
        for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) row.logits[i] = -INFINITY;
        __syncthreads();
        for (u32 i = threadIdx.x; i < query.allowed; i += blockDim.x) row.logits[changes[i].token] = saved[i];
        __syncthreads();
    }
    changes += query.allowed;
    for (u32 i = threadIdx.x; i < query.banned; i += blockDim.x) row.logits[changes[i].token] = -INFINITY;
    __syncthreads();
    changes += query.banned;
    for (u32 i = threadIdx.x; i < query.biased; i += blockDim.x) {
        const u32 token = changes[i].token;
        if (i > 0 && changes[i - 1].token == token) continue;
        float logit = row.logits[token];
        for (u32 j = i; j < query.biased && changes[j].token == token; j++) {
            const float bias = __uint_as_float(changes[j].value);
            logit = bias == -INFINITY ? bias : saturate_logit(logit, logit + bias);
        }
        row.logits[token] = logit;
    }
    __syncthreads();
    changes += query.biased;
    for (u32 i = threadIdx.x; i < query.seen; i += blockDim.x) {
        float* logit = row.logits + changes[i].token;
        *logit = penalise(query, *logit, changes[i].value);
    }
    __syncthreads();
}

/// Brings back the logits of all tokens that can be drawn.
__device__ __forceinline__ void restore_logits(const LogitRow& row, const SamplingQuery& query,
                                               const LogitChange* changes, const float* saved) {
    const u32 all = count_changes(query);
    for (u32 i = threadIdx.x; i < all; i += blockDim.x) row.logits[changes[i].token] = saved[i];
}

/// The key of the last token that can be drawn.
__device__ __forceinline__ u64 last_drawable(const LogitRow& row, const SamplingQuery& query, const ByMass& weigh,
                                             u64 finite, const Selection& shared) {
    u64 last = ALL_FINITE, kept = finite;
    if (query.least_scaled > -INFINITY) {
        u64 order = 0, count = 0;
        for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) {
            const float logit = row.logits[i];
            if (!(weigh.scaled(logit) >= query.least_scaled)) continue;
            order = Most()(order, order_of(logit));
            count++;
        }
        last = block_combine(order, shared.scratch, Most()) << 32 | 0xffffffff;
        kept = block_combine(count, shared.scratch, Add());
    }
    if (query.top_k > 0 && query.top_k < kept) {
        last = select_key(row, weigh.greatest, last, query.top_k, ByCount(), shared);
    }
    if (query.top_p < 1.0f) {
        const u64 all = weight_up_to(row, last, weigh, shared.scratch);
        const u64 wanted = u64(ceil(double(query.top_p) * double(all)));
        last = select_key(row, weigh.greatest, last, Most()(wanted, 1), weigh, shared);
    }
    return last;
}

/// Tokens of a piece of a row: a multiple of a warp.
__device__ __forceinline__ u32 piece_tokens(u32 vocab) {
    return ceil_div(ceil_div(vocab, MOST_PIECES), WARP_LANES) * WARP_LANES;
}

/// Fills in the weight up to the end of each piece; gives the weight of all. Only tokens up to `last` have one.
__device__ __forceinline__ u64 add_up_pieces(const LogitRow& row, u64 last, const ByMass& weigh, u64* ends) {
    const u32 lane = threadIdx.x % WARP_LANES, tokens = piece_tokens(row.vocab), pieces = ceil_div(row.vocab, tokens);
    __syncthreads();
    for (u32 piece = threadIdx.x / WARP_LANES; piece < pieces; piece += blockDim.x / WARP_LANES) {
        u64 sum = 0;
        const u32 end = min(row.vocab, (piece + 1) * tokens);
        for (u32 i = piece * tokens + lane; i < end; i += WARP_LANES) {
            const float logit = row.logits[i];
            if (key_of(i, logit) <= last) sum += weigh(logit);
        }
        for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, apart);
        if (lane == 0) ends[piece] = sum;
    }
    __syncthreads();
    if (threadIdx.x < WARP_LANES) {
        u64 before = 0;
        for (u32 base = 0; base < pieces; base += WARP_LANES) {
            const bool exists = base + lane < pieces;
            const u64 end = before + sum_up_to(exists ? ends[base + lane] : 0);
            if (exists) ends[base + lane] = end;
            before = __shfl_sync(ALL_LANES, end, WARP_LANES - 1);
        }
    }
    __syncthreads();
    return ends[pieces - 1];
}

/// The token at `target` when the weights are laid end to end in the order of ids; a warp looks for it. `target` is
/// less than the weight of all.
__device__ __forceinline__ u32 token_at(const LogitRow& row, u64 target, u64 last, const ByMass& weigh,
                                        const u64* ends) {
    const u32 lane = threadIdx.x % WARP_LANES, tokens = piece_tokens(row.vocab);
    u32 piece = 0;
    for (u32 end = ceil_div(row.vocab, tokens); piece < end;) {
        const u32 middle = piece + (end - piece) / 2;
        if (ends[middle] > target) end = middle;
        else piece = middle + 1;
    }
    u64 before = piece > 0 ? ends[piece - 1] : 0;
    for (u32 base = piece * tokens; base < row.vocab; base += WARP_LANES) {
        const u32 i = base + lane;
        u64 weight = 0;
        if (i < row.vocab) {
            const float logit = row.logits[i];
            weight = key_of(i, logit) <= last ? weigh(logit) : 0;
        }
        const u64 up_to = before + sum_up_to(weight);
        const u32 passed = __ballot_sync(ALL_LANES, up_to > target);
        if (passed) return base + u32(__ffs(int(passed))) - 1;
        before = __shfl_sync(ALL_LANES, up_to, WARP_LANES - 1);
    }
    return 0;
}

/// Writes `count` greatest logits, of `finite` above negative infinity, in no particular order.
__device__ __forceinline__ void write_top(const LogitRow& row, float greatest, u32 count, u64 finite, u32* out,
                                          const Selection& shared) {
    u64 last = ALL_FINITE;
    if (count < finite) last = select_key(row, greatest, last, count, ByCount(), shared);
    __syncthreads();
    if (threadIdx.x == 0) *shared.count = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) {
        const float logit = row.logits[i];
        if (key_of(i, logit) > last) continue;
        const u32 place = atomicAdd(shared.count, 1u);
        out[2 * place] = i, out[2 * place + 1] = __float_as_uint(logit);
    }
}

/// Draws of a row from the logits as they are now; gives the weight of all tokens that can be drawn.
__device__ __forceinline__ u64 draw_tokens(const LogitRow& row, const SamplingQuery& query, const Extremes& found,
                                           float greatest, const u64* random, SamplingDraw* draws, u32* kept,
                                           u64* ends, const Selection& shared) {
    const u32 lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES, warps = blockDim.x / WARP_LANES;
    if (query.temperature == 0.0f) {
        for (u32 draw = threadIdx.x; draw < query.draws; draw += blockDim.x) draws[draw].token = u32(found.best);
        return 0;
    }
    const ByMass weigh = {greatest, query.temperature};
    const u64 last = last_drawable(row, query, weigh, found.finite, shared);
    const u64 weight = add_up_pieces(row, last, weigh, ends);
    for (u32 draw = warp; draw < query.draws; draw += warps) {
        const u64 target = __umul64hi(random[draw], weight);
        const u32 token = token_at(row, target, last, weigh, ends);
        if (lane == 0) draws[draw].token = token;
    }
    if (query.kept) {
        for (u32 base = warp * WARP_LANES; base < row.vocab; base += blockDim.x) {
            const u32 i = base + lane;
            const u32 bits = __ballot_sync(ALL_LANES, i < row.vocab && key_of(i, row.logits[i]) <= last);
            if (lane == 0) kept[base / WARP_LANES] = bits;
        }
    }
    return weight;
}

/// Answers what is asked. Rows of which logits change are not whole afterwards. `saved` has room for a logit of each
/// change. Grid (queries), whole warps, at least two.
extern "C" __global__ void __launch_bounds__(1024)
    sample_rows(float* logits, u32 vocab, const SamplingQuery* queries, const u64* random, const LogitChange* changes,
                float* saved, u32* answers) {
    STATIC_SHARED(u64, memory, EXPS);
    STATIC_SHARED(u64, scratch, WARP_LANES + 3);
    u32* counters = reinterpret_cast<u32*>(scratch + WARP_LANES + 2);
    u64* ends = memory + BINS + 2 * MOST_LISTED;
    static_assert(BINS + 2 * MOST_LISTED + MOST_PIECES <= EXPS, "they fit");
    const Selection shared = {memory,  memory + BINS, memory + BINS + MOST_LISTED, scratch, scratch + WARP_LANES,
                              scratch + WARP_LANES + 1, counters, counters + 1};
    const SamplingQuery& query = queries[blockIdx.x];
    const LogitRow row = {logits + u64(query.row) * vocab, vocab};
    SamplingAnswer& answer = *reinterpret_cast<SamplingAnswer*>(answers + query.answer);
    SamplingDraw* draws = reinterpret_cast<SamplingDraw*>(&answer + 1);
    u32* top = reinterpret_cast<u32*>(draws + query.draws);

    Extremes found = extremes(row, scratch);
    const bool sound = found.finite > 0 && found.unsound == 0;
    if (threadIdx.x == 0) answer.sound = sound;
    if (!sound) return;
    float greatest = row.logits[u32(found.best)] + 0.0f;
    const float exps = sum_of_exps(row, greatest, reinterpret_cast<float*>(memory));
    if (threadIdx.x == 0) {
        answer.greatest = greatest, answer.exps = exps;
        answer.token_logit = query.token == NO_TOKEN ? 0.0f : row.logits[query.token];
        answer.top = min(query.top, u32(found.finite));
    }
    if (query.top > 0) write_top(row, greatest, min(query.top, u32(found.finite)), found.finite, top, shared);
    if (query.draws == 0) return;

    __syncthreads();
    const bool changed = query.restricted || count_changes(query) > 0;
    changes += query.first_change, saved += query.first_change;
    if (changed) {
        change_logits(row, query, changes, saved);
        found = extremes(row, scratch);
        const bool possible = found.finite > 0 && found.unsound == 0;
        if (threadIdx.x == 0) answer.possible = possible;
        if (!possible) return;
        greatest = row.logits[u32(found.best)] + 0.0f;
    }
    const u64 weight = draw_tokens(row, query, found, greatest, random + query.first_random, draws,
                                   top + 2 * query.top, ends, shared);
    if (threadIdx.x == 0) {
        answer.possible = 1, answer.greatest_changed = greatest;
        answer.weight_low = u32(weight), answer.weight_high = u32(weight >> 32);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < query.draws; i += blockDim.x) draws[i].changed = row.logits[draws[i].token];
    __syncthreads();
    if (changed) restore_logits(row, query, changes, saved);
    __syncthreads();
    for (u32 i = threadIdx.x; i < query.draws; i += blockDim.x) draws[i].logit = row.logits[draws[i].token];
}
SHIM_EXPORT(sample_rows)
