/// A value, or arrays and dictionaries of them.
public indirect enum NestedItem<Key: Hashable, Element> {
    case none
    case value(Element)
    case array([NestedItem<Key, Element>])
    case dictionary([Key: NestedItem<Key, Element>])

    public func mapValues<Result>(
        _ transform: (Element) throws -> Result
    ) rethrows -> NestedItem<Key, Result> {
        switch self {
        case .none: .none
        case .value(let value): .value(try transform(value))
        case .array(let items): .array(try items.map { try $0.mapValues(transform) })
        case .dictionary(let items):
            .dictionary(try items.mapValues { try $0.mapValues(transform) })
        }
    }

    /// The values with their dotted paths.
    public func flattened(prefix: String? = nil) -> [(String, Element)] {
        func path(_ key: Any) -> String { prefix.map { "\($0).\(key)" } ?? "\(key)" }
        return switch self {
        case .none: []
        case .value(let value): [(prefix ?? "", value)]
        case .array(let items):
            items.enumerated().flatMap { $0.element.flattened(prefix: path($0.offset)) }
        case .dictionary(let items):
            items.flatMap { $0.value.flattened(prefix: path($0.key)) }
        }
    }
}

/// A tree of values by name: a module's parameters, or its children.
public struct NestedDictionary<Key: Hashable, Element> {
    var contents: [Key: NestedItem<Key, Element>]

    public init() { contents = [:] }
    public init(values: [Key: NestedItem<Key, Element>]) { contents = values }

    public subscript(key: Key) -> NestedItem<Key, Element>? {
        get { contents[key] }
        set { contents[key] = newValue }
    }

    public var keys: Dictionary<Key, NestedItem<Key, Element>>.Keys { contents.keys }
    public var isEmpty: Bool { contents.isEmpty }
    public var count: Int { contents.count }

    public func asItem() -> NestedItem<Key, Element> { .dictionary(contents) }

    public func mapValues<Result>(
        transform: (Element) throws -> Result
    ) rethrows -> NestedDictionary<Key, Result> {
        NestedDictionary<Key, Result>(
            values: try contents.mapValues { try $0.mapValues(transform) })
    }

    public func flattened(prefix: String? = nil) -> [(String, Element)] {
        asItem().flattened(prefix: prefix)
    }

    public func flattenedValues() -> [Element] { flattened().map(\.1) }
}

extension NestedDictionary where Key == String {
    /// The tree of dotted paths; where all names are numbers, an array.
    public static func unflattened(_ flat: some Collection<(String, Element)>) -> Self {
        guard case .dictionary(let contents) = tree(flat.map { ($0.0.split(separator: "."), $0.1) })
        else { return Self() }
        return Self(values: contents)
    }

    public static func unflattened(_ flat: [String: Element]) -> Self {
        unflattened(flat.map { ($0.key, $0.value) })
    }

    private static func tree(
        _ flat: [(path: [Substring], value: Element)], isTop: Bool = true
    ) -> NestedItem<String, Element> {
        if let first = flat.first, first.path.isEmpty { return .value(first.value) }
        let groups = Dictionary(grouping: flat, by: { String($0.path[0]) }).mapValues {
            tree($0.map { (Array($0.path.dropFirst()), $0.value) }, isTop: false)
        }
        let numbers = groups.keys.compactMap { Int($0) }
        guard !isTop, numbers.count == groups.count, let last = numbers.max() else {
            return .dictionary(groups)
        }
        return .array((0 ... last).map { groups["\($0)"] ?? .none })
    }
}
