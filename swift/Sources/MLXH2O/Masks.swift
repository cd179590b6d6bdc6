import MLX

/// What a mask may be: nothing, causal (aligned at the end), or an array of booleans or numbers.
enum Mask {
    case none
    case causal
    case array(MLXArray)

    init(_ mode: MLXFast.ScaledDotProductAttentionMaskMode) {
        if let array = mode.mask {
            self = .array(array)
        } else if case .causal = mode {
            self = .causal
        } else {
            self = .none
        }
    }

    /// The mask as MLX's fused attention takes it: additive ones in the queries' dtype.
    func fast(_ dtype: DType) -> MLXFast.ScaledDotProductAttentionMaskMode {
        switch self {
        case .none: .none
        case .causal: .causal
        case .array(let mask): .array(mask.dtype == .bool ? mask : mask.asType(dtype))
        }
    }

    /// The mask of L queries over some of N keys.
    func columns(_ range: Range<Int>, L: Int, N: Int) -> Mask {
        switch self {
        case .none: return .none
        case .array(let mask): return mask.dim(-1) > 1 ? .array(mask.slicedLast(range)) : self
        case .causal:
            // The first query sees them all.
            if range.upperBound <= N - L + 1 { return .none }
            if range.upperBound == N && range.count >= L { return .causal }
            return .array(positions(range) .<= positions(N - L ..< N).column)
        }
    }

    /// The mask of some of L new tokens when only they are new.
    func tokens(_ range: Range<Int>, of L: Int) -> Mask {
        switch self {
        case .none: return .none
        case .causal: return range.count > 1 ? .causal : .none
        case .array(var mask):
            if mask.dim(-2) > 1 { mask = mask.sliced(range, axis: mask.ndim - 2) }
            if mask.dim(-1) > 1 {
                let first = mask.dim(-1) - L
                mask = mask.slicedLast(first + range.lowerBound ..< first + range.upperBound)
            }
            return .array(mask)
        }
    }

    /// Cut a mask over L queries and N keys to some of the queries.
    ///
    /// - Parameters:
    ///   - queries: Which.
    ///   - L: Queries of the whole call.
    ///   - N: Keys of the whole call.
    ///   - newColumnsOnly: Whether only the last L columns of an array mask are to be read.
    /// - Returns: How many keys (the first so many) those queries see, and their mask.
    func block(_ queries: Range<Int>, L: Int, N: Int, newColumnsOnly: Bool) -> (
        keys: Int, mask: Mask
    ) {
        switch self {
        case .none: return (N, .none)
        case .causal: return (N - L + queries.upperBound, .causal)
        case .array(var mask):
            if mask.dim(-2) > 1 {
                mask = mask.sliced(queries, axis: mask.ndim - 2)
            }
            if newColumnsOnly && mask.dim(-1) > 1 {
                mask = mask.slicedLast(mask.dim(-1) - L ..< mask.dim(-1))
                if N > L {
                    let visible = Array(mask.shape.dropLast()) + [N - L]
                    let old =
                        mask.dtype == .bool
                        ? MLXArray.ones(visible, dtype: .bool)
                        : MLXArray.zeros(visible, dtype: mask.dtype)
                    mask = concatenated([old, mask], axis: -1)
                }
            }
            return (N, .array(mask))
        }
    }
}
