import MLX

/// Where new rows stand: one position for all, or one for each batch row.
public enum RoPEOffset {
    case scalar(Int)
    case batch(MLXArray)
}

/// The keys and values of one layer.
public protocol KVCache: Evaluatable {
    var offset: Int { get }
    var ropeOffset: RoPEOffset { get }
    var maxSize: Int? { get }
    func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray)
    var state: [MLXArray] { get set }
    var metaState: [String] { get set }
    var isTrimmable: Bool { get }
    @discardableResult func trim(_ n: Int) -> Int
    func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode
    func copy() -> any KVCache
    func prepare(lengths: [Int]?)
    func prepare(lengths: MLXArray?)
    func finalize()
}

extension KVCache {
    public var ropeOffset: RoPEOffset { .scalar(offset) }
    public func prepare(lengths: [Int]?) {}
    public func prepare(lengths: MLXArray?) {}
    public func finalize() {}
}

/// A cache whose batch rows stand at different positions.
public protocol BatchPositionedKVCache: KVCache {
    var batchOffset: MLXArray { get }
}

extension BatchPositionedKVCache {
    public var ropeOffset: RoPEOffset { .batch(batchOffset + 0) }
}

/// Tells the caches the lengths of the batch's rows while the body runs.
public func withPreparedCache<Result>(
    _ cache: [any KVCache], lengths: [Int]?, _ body: () throws -> Result
) rethrows -> Result {
    guard let lengths else { return try body() }
    for cache in cache { cache.prepare(lengths: lengths) }
    defer { for cache in cache { cache.finalize() } }
    return try body()
}

/// What the stock caches share.
open class BaseKVCache: KVCache {
    public var offset = 0
    public var maxSize: Int? { nil }

    init() {}

    public func innerState() -> [MLXArray] { [] }

    open func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        fatalError("update(keys:values:) must be implemented by subclass")
    }

    open var state: [MLXArray] {
        get { [] }
        set { precondition(newValue.isEmpty, "this cache has no state") }
    }

    open var metaState: [String] {
        get { [""] }
        set { precondition(newValue == [""], "this cache has no metaState") }
    }

    open var isTrimmable: Bool { false }
    @discardableResult open func trim(_ n: Int) -> Int { 0 }

    open func copy() -> any KVCache { fatalError("copy() must be implemented by subclass") }

    open func prepare(lengths: [Int]?) {}
    open func prepare(lengths: MLXArray?) {}
    open func finalize() {}

    open func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        stockMask(n: n, offset: offset, windowSize: windowSize, returnArray: returnArray)
    }
}

/// The cache that keeps everything.
public class KVCacheSimple: BaseKVCache {
    var keys: MLXArray?
    var values: MLXArray?
    public var step = 256

    public override init() { super.init() }

    public override func innerState() -> [MLXArray] { [keys, values].compactMap { $0 } }

    public override func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        let end = offset + keys.dim(2)
        self.keys = grown(self.keys, for: keys)
        self.values = grown(self.values, for: values)
        self.keys![.ellipsis, offset ..< end, 0...] = keys
        self.values![.ellipsis, offset ..< end, 0...] = values
        offset = end
        return (self.keys![.ellipsis, ..<end, 0...], self.values![.ellipsis, ..<end, 0...])
    }

    /// The buffer with room for the new rows, in steps.
    private func grown(_ buffer: MLXArray?, for rows: MLXArray) -> MLXArray {
        if let buffer, offset + rows.dim(2) <= buffer.dim(2) { return buffer }
        let steps = (rows.dim(2) + step - 1) / step
        let more = MLXArray.zeros(
            [rows.dim(0), rows.dim(1), steps * step, rows.dim(3)], dtype: rows.dtype)
        guard let buffer else { return more }
        return concatenated([buffer[.ellipsis, ..<offset, 0...], more], axis: 2)
    }

    public override var state: [MLXArray] {
        get { [keys, values].compactMap { $0?[.ellipsis, ..<offset, 0...] } }
        set {
            precondition(newValue.count == 2, "a state of keys and values")
            (keys, values) = (newValue[0], newValue[1])
            offset = newValue[0].dim(2)
        }
    }

    public override var isTrimmable: Bool { true }

    @discardableResult public override func trim(_ n: Int) -> Int {
        let trimmed = min(offset, n)
        offset -= trimmed
        return trimmed
    }

    public override func copy() -> any KVCache {
        let copy = KVCacheSimple()
        copy.step = step
        if keys != nil { copy.state = state.map { $0[.ellipsis] } }
        return copy
    }
}

public func canTrimPromptCache(_ cache: [any KVCache]) -> Bool { cache.allSatisfy(\.isTrimmable) }

/// Takes so many tokens back in all caches, if all of them can; how many the first one took.
@discardableResult
public func trimPromptCache(_ cache: [any KVCache], numTokens: Int) -> Int {
    guard canTrimPromptCache(cache), !cache.isEmpty else { return 0 }
    return cache.map { $0.trim(numTokens) }[0]
}
