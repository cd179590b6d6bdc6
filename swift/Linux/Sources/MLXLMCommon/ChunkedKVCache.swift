import MLX

/// A plain cache whose model forgets all but the last chunk.
public class ChunkedKVCache: KVCacheSimple {
    private var chunkSize: Int?
    private var start = 0

    public init(chunkSize: Int? = nil) {
        self.chunkSize = chunkSize
        super.init()
    }

    public func maybeTrimFront() {
        guard let chunkSize, let keys, let values, keys.dim(2) >= chunkSize else { return }
        start += keys.dim(2) - chunkSize
        self.keys = keys[.ellipsis, (-chunkSize)..., 0...]
        self.values = values[.ellipsis, (-chunkSize)..., 0...]
    }

    public override func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        self.keys = self.keys.map { concatenated([$0, keys], axis: 2) } ?? keys
        self.values = self.values.map { concatenated([$0, values], axis: 2) } ?? values
        offset += keys.dim(2)
        return (self.keys!, self.values!)
    }

    public override var metaState: [String] {
        get { [chunkSize?.description ?? "None", "\(start)"] }
        set { (chunkSize, start) = (Int(newValue[0]), Int(newValue[1])!) }
    }
}
