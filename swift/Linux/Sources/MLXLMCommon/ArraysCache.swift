import MLX

/// A state of fixed size: so many arrays.
public class ArraysCache: BaseKVCache {
    private var arrays: [MLXArray?]

    public init(size: Int, leftPadding: [Int]? = nil) {
        precondition(leftPadding == nil, "the stand-in knows no padding")
        arrays = Array(repeating: nil, count: size)
        super.init()
    }

    public subscript(index: Int) -> MLXArray? {
        get { arrays[index] }
        set { arrays[index] = newValue }
    }

    public override func innerState() -> [MLXArray] { arrays.compactMap { $0 } }

    public override var state: [MLXArray] {
        get { innerState() }
        set { arrays = newValue }
    }

    public override func copy() -> any KVCache { copied(to: ArraysCache(size: arrays.count)) }

    func copied(to copy: ArraysCache) -> ArraysCache {
        copy.arrays = arrays.map { $0?[.ellipsis] }
        copy.offset = offset
        return copy
    }
}

/// The state of a state-space layer.
public class MambaCache: ArraysCache {
    public init(leftPadding: [Int]? = nil) { super.init(size: 2, leftPadding: leftPadding) }

    public override func copy() -> any KVCache { copied(to: MambaCache()) }
}
