import MLX

/// A cache that keeps everything, packed.
public class QuantizedKVCache: BaseKVCache, QuantizedKVCacheProtocol {
    public let groupSize: Int
    public let bits: Int
    public let mode: QuantizationMode
    private typealias Packed = (MLXArray, MLXArray, MLXArray?)
    private var keys: Packed?
    private var values: Packed?

    public init(groupSize: Int = 64, bits: Int = 8, mode: QuantizationMode = .affine) {
        (self.groupSize, self.bits, self.mode) = (groupSize, bits, mode)
        super.init()
    }

    public override func innerState() -> [MLXArray] {
        [keys, values].flatMap { [$0?.0, $0?.1, $0?.2].compactMap { $0 } }
    }

    public override func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        fatalError("`update` was called on `QuantizedKVCache`. Use `updateQuantized` instead.")
    }

    public func updateQuantized(
        keys: MLXArray, values: MLXArray
    ) -> ((MLXArray, MLXArray, MLXArray?), (MLXArray, MLXArray, MLXArray?)) {
        self.keys = appended(keys, to: self.keys)
        self.values = appended(values, to: self.values)
        offset += keys.dim(2)
        return (self.keys!, self.values!)
    }

    private func appended(_ rows: MLXArray, to held: Packed?) -> Packed {
        let new: Packed = quantized(rows, groupSize: groupSize, bits: bits)
        guard let held else { return new }
        func both(_ a: MLXArray, _ b: MLXArray) -> MLXArray { concatenated([a, b], axis: 2) }
        return (both(held.0, new.0), both(held.1, new.1), new.2.map { both(held.2!, $0) })
    }

    public func getQuantizedState() -> (
        (MLXArray, MLXArray, MLXArray?), (MLXArray, MLXArray, MLXArray?)
    )? {
        guard let keys, let values else { return nil }
        return (keys, values)
    }
}
