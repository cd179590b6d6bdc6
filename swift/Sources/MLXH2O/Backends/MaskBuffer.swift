import MLX

/// A mask as kernels get it: a kind, and a buffer where it is an array.
extension Mask {
    /// The template argument, as in masks.h, and how many columns an array mask has.
    func launched(queries: Int, slots: Int) -> (kind: Int, columns: Int) {
        switch self {
        case .none: (0, 0)
        case .causal: (queries == 1 ? 0 : 1, 0)
        case .array(let mask): (2, mask.dim(-1) > 1 ? mask.dim(-1) : slots)
        }
    }

    /// An array mask as a view of `[B, Hq, L, columns]`.
    func buffer(_ shape: [Int]) -> MLXArray? {
        guard case .array(let mask) = self else { return nil }
        let ones = Array(repeating: 1, count: 4 - mask.ndim)
        return broadcast(mask.reshaped(ones + mask.shape), to: shape)
    }
}
