import MLX

/// Several caches of one layer.
public class CacheList: BaseKVCache {
    private var caches: [KVCache]

    public init(_ caches: KVCache...) {
        self.caches = caches
        super.init()
    }

    private init(caches: [KVCache]) {
        self.caches = caches
        super.init()
    }

    public subscript(index: Int) -> KVCache { caches[index] }

    /// Replace every member, those of a list within the list too.
    public func mapChildren(_ transform: (KVCache) -> KVCache) {
        caches = caches.map { child in
            guard let list = child as? CacheList else { return transform(child) }
            list.mapChildren(transform)
            return list
        }
    }

    public override func innerState() -> [MLXArray] { caches.flatMap { $0.innerState() } }

    public override func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        fatalError("CacheList should not use update(keys:values:) - use subscript access instead")
    }

    public override var isTrimmable: Bool { caches.allSatisfy(\.isTrimmable) }

    @discardableResult public override func trim(_ n: Int) -> Int {
        caches.reduce(0) { $1.trim(n) }
    }

    public override func copy() -> any KVCache { CacheList(caches: caches.map { $0.copy() }) }

    public override func prepare(lengths: [Int]?) {
        for c in caches { c.prepare(lengths: lengths) }
    }
    public override func prepare(lengths: MLXArray?) {
        for c in caches { c.prepare(lengths: lengths) }
    }
    public override func finalize() { for c in caches { c.finalize() } }
}
