/// A value of a model's configuration whose type varies.
public enum StringOrNumber: Codable, Equatable, Sendable {
    case string(String)
    case int(Int)
    case float(Float)
    case ints([Int])
    case floats([Float])
    case bool(Bool)

    public init(from decoder: Decoder) throws {
        let value = try decoder.singleValueContainer()
        func read<T: Decodable>(_ make: (T) -> Self) -> Self? {
            (try? value.decode(T.self)).map(make)
        }
        self =
            try read(Self.int) ?? read(Self.float) ?? read(Self.ints) ?? read(Self.floats)
            ?? read(Self.bool) ?? .string(value.decode(String.self))
    }

    public func encode(to encoder: Encoder) throws {
        var container = encoder.singleValueContainer()
        switch self {
        case .string(let value): try container.encode(value)
        case .int(let value): try container.encode(value)
        case .float(let value): try container.encode(value)
        case .ints(let value): try container.encode(value)
        case .floats(let value): try container.encode(value)
        case .bool(let value): try container.encode(value)
        }
    }

    public func asFloats() -> [Float]? {
        switch self {
        case .string: nil
        case .int(let value): [Float(value)]
        case .float(let value): [value]
        case .ints(let values): values.map { Float($0) }
        case .floats(let values): values
        case .bool(let value): [value ? 1 : 0]
        }
    }

    public func asFloat() -> Float? {
        let values = asFloats()
        return values?.count == 1 ? values![0] : nil
    }

    public func asInts() -> [Int]? {
        switch self {
        case .int(let value): [value]
        case .ints(let values): values
        default: nil
        }
    }

    public func asInt() -> Int? {
        if case .bool(let value) = self { return value ? 1 : 0 }
        let values = asInts()
        return values?.count == 1 ? values![0] : nil
    }
}
