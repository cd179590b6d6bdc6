import MLX

/// The cache of a window: the first `keep` tokens and the latest ones.
public class RotatingKVCache: BaseKVCache {
    private var keep: Int
    private var maxCacheSize: Int
    private let step: Int
    private var keys: MLXArray?
    private var values: MLXArray?
    /// The slot of the next row, once the window is full.
    private var next = 0

    public override var maxSize: Int? { maxCacheSize }

    public init(maxSize: Int, keep: Int = 0, step: Int = 256) {
        maxCacheSize = maxSize
        self.keep = keep
        self.step = step
        super.init()
    }

    public override func innerState() -> [MLXArray] { [keys, values].compactMap { $0 } }

    public override func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        let count = keys.dim(2)
        let held = self.keys?.dim(2) ?? 0
        if count == 1 && held == maxCacheSize {
            if next >= maxCacheSize { next = keep }
            self.keys![.ellipsis, next ..< next + 1, 0...] = keys
            self.values![.ellipsis, next ..< next + 1, 0...] = values
        } else {
            // A chunk still sees the whole window before its first token.
            self.keys = appended(keys, to: inOrder(self.keys), window: maxCacheSize - 1)
            self.values = appended(values, to: inOrder(self.values), window: maxCacheSize - 1)
            if count == 1 {
                self.keys = trimmed(self.keys!, to: maxCacheSize)
                self.values = trimmed(self.values!, to: maxCacheSize)
            }
            next = self.keys!.dim(2) - 1
        }
        next += 1
        offset += count
        return (self.keys!, self.values!)
    }

    /// Oldest first, after the first `keep`.
    private func inOrder(_ rows: MLXArray?) -> MLXArray? {
        guard let rows, next < rows.dim(2) else { return rows }
        return concatenated(
            [
                rows[.ellipsis, ..<keep, 0...], rows[.ellipsis, next..., 0...],
                rows[.ellipsis, keep ..< next, 0...],
            ], axis: 2)
    }

    private func appended(_ new: MLXArray, to rows: MLXArray?, window: Int) -> MLXArray {
        guard let rows else { return new }
        return concatenated([trimmed(rows, to: window), new], axis: 2)
    }

    /// Without the oldest rows after the first `keep`.
    private func trimmed(_ rows: MLXArray, to count: Int) -> MLXArray {
        let excess = rows.dim(2) - count
        if excess <= 0 { return rows }
        return concatenated(
            [rows[.ellipsis, ..<keep, 0...], rows[.ellipsis, (keep + excess)..., 0...]], axis: 2)
    }

    public override var state: [MLXArray] {
        get { innerState() }
        set {
            precondition(newValue.count == 2, "a state of keys and values")
            (keys, values) = (newValue[0], newValue[1])
        }
    }

    public override var metaState: [String] {
        get { [keep, maxCacheSize, step, offset, next].map { "\($0)" } }
        set {
            let numbers = newValue.map { Int($0)! }
            (keep, maxCacheSize, offset, next) = (numbers[0], numbers[1], numbers[3], numbers[4])
        }
    }

    public override var isTrimmable: Bool { offset < maxCacheSize }

    @discardableResult public override func trim(_ n: Int) -> Int {
        let trimmed = min(offset, n)
        offset -= trimmed
        next -= trimmed
        keys = keys?[.ellipsis, ..<next, 0...]
        values = values?[.ellipsis, ..<next, 0...]
        return trimmed
    }

    public override func copy() -> any KVCache {
        let copy = RotatingKVCache(maxSize: maxCacheSize, keep: keep, step: step)
        if keys != nil { copy.state = state.map { $0[.ellipsis] } }
        copy.metaState = metaState
        return copy
    }

    public override func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        if n == 1 { return .none }
        let window = windowSize ?? maxCacheSize
        let before = min(maxCacheSize - 1, offset)
        if before + n > window || returnArray {
            return .array(createCausalMask(n: n, offset: before, windowSize: window))
        }
        return .causal
    }
}
